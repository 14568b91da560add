package regcache

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// An object that replaces another one is not removed by those who open it at that time.
func TestReplaceWhileOpening(t *testing.T) {
	st, err := openStore(t.TempDir(), 1<<30, nil)
	if err != nil {
		t.Fatal(err)
	}
	put := func(text string) {
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
	put("x")
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
		put(strings.Repeat("x", i))
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
