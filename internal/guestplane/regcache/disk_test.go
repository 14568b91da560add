package regcache

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// put stores an object.
func put(t *testing.T, st *store, text string) {
	t.Helper()
	d, err := st.create(meta{})
	if err == nil {
		_, err = d.file.WriteAt([]byte(text), d.off)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.size = int64(len(text))
	if err := d.keep(NPM, "key"); err != nil {
		t.Fatal(err)
	}
	_ = d.file.Close()
}

// An object that replaces another one is not removed by those who open it at that time.
func TestReplaceWhileOpening(t *testing.T) {
	st, err := openStore(t.TempDir(), 1<<30, nil)
	if err != nil {
		t.Fatal(err)
	}
	put(t, st, "x")
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for !stop.Load() {
				if o := st.open(NPM, "key"); o != nil {
					o.close()
				}
			}
		})
	}
	for i := range 150 {
		put(t, st, strings.Repeat("x", i))
		if use := st.usage(NPM); use.Objects != 1 {
			t.Errorf("replacement %d: %+v", i, use)
			break
		}
	}
	stop.Store(true)
	wg.Wait()
	if o := st.open(NPM, "key"); o == nil {
		t.Error("the object is lost")
	} else {
		o.close()
	}
}

// An object that cannot be removed is an error that says what to do.
func TestClearFails(t *testing.T) {
	dir := t.TempDir()
	st, err := openStore(dir, 1<<30, nil)
	if err != nil {
		t.Fatal(err)
	}
	put(t, st, "x")
	file := st.path(NPM, id("key"))
	if err := errors.Join(os.Remove(file), os.MkdirAll(filepath.Join(file, "other"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if gone, err := st.clear("*"); gone.Objects != 0 || agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("%+v, %v", gone, err)
	}
}
