package fake

import (
	"archive/tar"
	"errors"
	"flag"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// copyFiles simulates 'agentlab-agent files push' and pull. A file whose text is "hostile
// NAME" is in an archive with this name.
func (p *process) copyFiles(args []string) int {
	f := flag.NewFlagSet("files", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	name, replace := f.String("name", "", ""), f.Bool("replace", false, "")
	f.String("mode", "", "")
	if len(args) == 0 || f.Parse(args[1:]) != nil || f.NArg() != 2 {
		return 2
	}
	kind, path := f.Arg(0), f.Arg(1)
	switch args[0] {
	case "push":
		return p.receive(path, kind, *name, *replace)
	case "pull":
		return p.sendFiles(path, kind)
	}
	return 2
}

func (p *process) sendFiles(path, kind string) int {
	disk := map[string]string{}
	p.files(path, func(all map[string]string) { disk = maps.Clone(all) })
	w := tar.NewWriter(p.out)
	if text, ok := disk[path]; ok {
		return packFile(w, path, text)
	}
	dir := strings.TrimSuffix(path, "/.")
	found := guestapi.FilesMissing
	for _, name := range slices.Sorted(maps.Keys(disk)) {
		rel, ok := strings.CutPrefix(name, dir+"/")
		switch {
		case !ok:
			continue
		case kind != guestapi.FilesTree:
			return guestapi.FilesIsDir
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

// receive extracts an archive that ends as 'agentlab-agent files push' requires. Every
// path that has files below it is a directory.
func (p *process) receive(to, kind, base string, force bool) int {
	at := strings.TrimSuffix(strings.TrimSuffix(to, "/."), "/")
	isDir, taken := false, false
	p.files(at, func(disk map[string]string) {
		for name := range disk {
			isDir = isDir || strings.HasPrefix(name, at+"/")
		}
	})
	if isDir && kind != guestapi.FilesContent {
		at += "/" + base
	}
	p.files(at, func(disk map[string]string) { _, taken = disk[at] })
	if kind == guestapi.FilesFile && taken && !force {
		_, _ = io.WriteString(p.errOut, at+"\n")
		return guestapi.FilesExists
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
		case kind == guestapi.FilesFile:
			found[at] += string(text)
		case h.Name == guestapi.FilesEnd:
			ended = true
		case h.Typeflag == tar.TypeReg:
			if rel, inside = strings.CutPrefix(h.Name, guestapi.FilesNew+"/"); inside {
				found[at+"/"+rel] = string(text)
			}
		}
	}
	if text := found[at]; kind == guestapi.FilesFile && len(text) >= guestapi.FilesSizeDigits {
		found[at], ended = text[:len(text)-guestapi.FilesSizeDigits], true
	}
	if !ended {
		return guestapi.FilesCut
	}
	p.files(at, func(disk map[string]string) { maps.Copy(disk, found) })
	return 0
}
