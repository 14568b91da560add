package fake

import (
	"archive/tar"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
)

// copyFiles simulates the scripts of cp: PATH tree|file writes an archive, and PATH
// file|tree|content NAME MODE FORCE extracts one. A file whose text is "hostile NAME" is
// in an archive with this name.
func (p *process) copyFiles(args []string) int {
	if len(args) > 2 {
		return p.receive(args[0], args[1], args[2], args[4] != "")
	}
	disk := map[string]string{}
	p.files(args[0], func(all map[string]string) { disk = maps.Clone(all) })
	w := tar.NewWriter(p.out)
	if text, ok := disk[args[0]]; ok {
		return packFile(w, args[0], text)
	}
	dir := strings.TrimSuffix(args[0], "/.")
	found := 20
	for _, name := range slices.Sorted(maps.Keys(disk)) {
		rel, ok := strings.CutPrefix(name, dir+"/")
		switch {
		case !ok:
			continue
		case args[1] != "tree":
			return 21
		case found != 0 && w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755}) != nil:
			return 2
		}
		found = 0
		if hostile, ok := strings.CutPrefix(disk[name], "hostile "); ok {
			rel = strings.TrimSpace(hostile)
		}
		if code := packEntry(w, "./"+rel, disk[name]); code != 0 {
			return code
		}
	}
	if found == 0 && w.Close() != nil {
		return 2
	}
	return found
}

func packFile(w *tar.Writer, name, text string) int {
	if code := packEntry(w, name, text); code != 0 {
		return code
	}
	if w.Close() != nil {
		return 2
	}
	return 0
}

func packEntry(w *tar.Writer, name, text string) int {
	if w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}) != nil {
		return 2
	}
	if _, err := io.WriteString(w, text); err != nil {
		return 2
	}
	return 0
}

// receive extracts an archive that ends as pushScript of package cli requires. Every
// path that has files below it is a directory.
func (p *process) receive(to, kind, base string, force bool) int {
	at := strings.TrimSuffix(strings.TrimSuffix(to, "/."), "/")
	isDir, taken := false, false
	p.files(at, func(disk map[string]string) {
		for name := range disk {
			isDir = isDir || strings.HasPrefix(name, at+"/")
		}
	})
	if isDir && kind != "content" {
		at += "/" + base
	}
	p.files(at, func(disk map[string]string) { _, taken = disk[at] })
	if kind == "file" && taken && !force {
		_, _ = io.WriteString(p.errOut, at+"\n")
		return 23
	}
	found, ended := map[string]string{}, false
	for r := tar.NewReader(p.stdin); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		text, rerr := io.ReadAll(r)
		switch rel, inside := "", false; {
		case err != nil || rerr != nil:
			return 2
		case kind == "file":
			found[at] += string(text)
		case h.Name == "end":
			ended = true
		case h.Typeflag == tar.TypeReg:
			if rel, inside = strings.CutPrefix(h.Name, "new/"); inside {
				found[at+"/"+rel] = string(text)
			}
		}
	}
	if text := found[at]; kind == "file" && len(text) >= 20 {
		found[at], ended = text[:len(text)-20], true
	}
	if !ended {
		return 26
	}
	p.files(at, func(disk map[string]string) { maps.Copy(disk, found) })
	return 0
}
