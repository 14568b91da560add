package daemon

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestLogFileRotates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d.log")
	l, err := openLog(path, 1000)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 100 {
				if _, err := fmt.Fprintf(l, "writer %d line %03d\n", w, i); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Write([]byte("late\n")); err == nil {
		t.Error("a closed log takes lines")
	}
	files, _ := filepath.Glob(path + "*")
	if len(files) != logFiles {
		t.Errorf("files %v", files)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		st, _ := os.Stat(f)
		if len(text) == 0 || len(text) > 1000 || !bytes.HasSuffix(text, []byte("\n")) || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %d bytes, mode %v", f, len(text), st.Mode())
		}
		for line := range strings.Lines(string(text)) {
			if len(line) != len("writer 0 line 000\n") {
				t.Errorf("%s: split line %q", f, line)
			}
		}
	}

	// The next daemon goes on in the same file.
	l, err = openLog(path, 1000)
	if err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(path)
	_, _ = l.Write([]byte("x\n"))
	_ = l.Close()
	after, _ := os.ReadFile(path)
	if !bytes.Equal(after, append(before, "x\n"...)) {
		t.Errorf("%q became %q", before, after)
	}
}

func TestLogFileDenied(t *testing.T) {
	if _, err := openLog(filepath.Join(t.TempDir(), "none", "d.log"), 1000); err == nil {
		t.Error("no error")
	}
}
