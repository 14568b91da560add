package fake

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// damaged is a file of a volume whose file system has errors.
const damaged = volumePath + "damaged"

// agentFiles simulates 'agentlab-agent files' and 'agentlab-agent workspace'.
func (p *process) agentFiles(args []string) int {
	if args[0] == "files" {
		return p.copyFiles(args[1:])
	}
	files := map[string]string{}
	if !p.g.in.h.volumeFiles(p.g.in.rec.Spec.UID, func(v *volume) { files = v.Files }) {
		fmt.Fprintln(p.errOut, "agentlab-agent: the guest has no workspace")
		return guestapi.MaintainFailed
	}
	switch args[1] {
	case "check", "repair":
		return p.fsck(args[1] == "repair", files)
	case "export":
		return p.pack(files)
	case "import":
		return p.unpack()
	}
	return 2
}

func (p *process) fsck(repair bool, files map[string]string) int {
	_, bad := files[damaged]
	switch _, whole := files[fileSystem]; {
	case !whole:
		fmt.Fprintln(p.out, "Bad magic number in super-block")
		return guestapi.MaintainNoFileSystem
	case bad && !repair:
		fmt.Fprintln(p.out, "WARNING: Filesystem still has errors")
		return 4
	case bad:
		p.files(damaged, func(disk map[string]string) { delete(disk, damaged) })
		fmt.Fprintln(p.out, "FILE SYSTEM WAS MODIFIED")
		return 1
	}
	fmt.Fprintf(p.out, "%d files\n", len(files)-1)
	return 0
}

func (p *process) pack(files map[string]string) int {
	w := tar.NewWriter(p.out)
	for _, path := range slices.Sorted(maps.Keys(files)) {
		if path == fileSystem {
			continue
		}
		h := &tar.Header{Name: "./" + strings.TrimPrefix(path, volumePath), Mode: 0o644, Size: int64(len(files[path]))}
		if link, ok := strings.CutPrefix(files[path], "hard link to "); ok { // of a hostile guest
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, strings.TrimSpace(link), 0
		}
		if w.WriteHeader(h) != nil {
			return 2
		}
		if _, err := io.WriteString(w, files[path][:h.Size]); err != nil {
			return 2
		}
	}
	if w.Close() != nil {
		return 2
	}
	return 0
}

func (p *process) unpack() int {
	r := tar.NewReader(p.stdin)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return 0
		}
		text, rerr := io.ReadAll(r)
		if err != nil || rerr != nil {
			fmt.Fprintln(p.errOut, "tar: This does not look like a tar archive")
			return 2
		}
		switch string(text) {
		case "lost on the way\n":
			continue
		case "stays on the way\n":
			<-p.ctx.Done()
			return 1
		}
		path := volumePath + strings.TrimPrefix(h.Name, "./")
		p.files(path, func(disk map[string]string) { disk[path] = string(text) })
	}
}
