package transfer

import (
	"archive/tar"
	"bytes"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Every difference between two files changes the check sum; how the archive describes the
// same file does not.
func TestArchiveSum(t *testing.T) {
	base := tar.Header{Name: "./a", Size: 3, Mode: 0o644, Uid: 1, Gid: 2, ModTime: time.Unix(1, 5), PAXRecords: map[string]string{"SCHILY.xattr.user.x": "y"}}
	sum := func(text string, change func(*tar.Header)) string {
		t.Helper()
		h, s := base, newArchiveSum(10)
		h.PAXRecords = map[string]string{"SCHILY.xattr.user.x": "y"}
		change(&h)
		if err := s.see(&h, bytes.NewReader([]byte(text))); err != nil {
			t.Fatal(err)
		}
		return string(s.sum())
	}
	want := sum("abc", func(*tar.Header) {})
	for name, change := range map[string]func(*tar.Header){
		"the name": func(h *tar.Header) { h.Name = "./b" }, "the link": func(h *tar.Header) { h.Linkname = "x" }, "the kind": func(h *tar.Header) { h.Typeflag = tar.TypeLink },
		"the size": func(h *tar.Header) { h.Size = 4 }, "the mode": func(h *tar.Header) { h.Mode = 0o600 }, "the owner": func(h *tar.Header) { h.Uid = 0 }, "the group": func(h *tar.Header) { h.Gid = 0 },
		"the time": func(h *tar.Header) { h.ModTime = time.Unix(1, 6) }, "an attribute": func(h *tar.Header) { h.PAXRecords["SCHILY.xattr.user.x"] = "z" },
		"no attribute": func(h *tar.Header) { delete(h.PAXRecords, "SCHILY.xattr.user.x") },
	} {
		if sum("abc", change) == want {
			t.Errorf("%s does not count", name)
		}
	}
	if sum("abd", func(*tar.Header) {}) == want {
		t.Error("the content does not count")
	}
	if sum("abc", func(h *tar.Header) {
		h.Name, h.Uname, h.AccessTime, h.PAXRecords["GNU.sparse.major"] = "a", "agent", time.Unix(9, 0), "1"
	}) != want {
		t.Error("what a copy may have otherwise counts")
	}
	s := newArchiveSum(2)
	if err := s.see(&base, bytes.NewReader(nil)); agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
		t.Errorf("too much: %v", err)
	}
}
