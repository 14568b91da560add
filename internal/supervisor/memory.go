package supervisor

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// ReadSizes reads a file of /proc with a size in kB on each line, such as
// /proc/meminfo. It returns the sizes in bytes, by name. Other lines are skipped.
func ReadSizes(path string) (map[string]int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	sizes := map[string]int64{}
	in := bufio.NewScanner(f)
	for in.Scan() {
		fields := strings.Fields(in.Text())
		if len(fields) != 3 || fields[2] != "kB" {
			continue
		}
		if n, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
			sizes[strings.TrimSuffix(fields[0], ":")] = n << 10
		}
	}
	return sizes, in.Err()
}

// Memory implements backend.Host: the memory of the supervisor and of
// the VM's process.
func (d Dir) Memory() (backend.Memory, error) {
	var sum backend.Memory
	for _, path := range []string{d.file(filePID), d.processID()} {
		m, err := memoryOf(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			return backend.Memory{}, agentlab.Errorf(agentlab.CodeConflict, "sandbox %d does not run", d.VMID)
		}
		if err != nil {
			return backend.Memory{}, fault(err, "cannot read the memory of sandbox %d", d.VMID)
		}
		sum.Unique += m.Unique
		sum.Shared += m.Shared
		sum.Proportional += m.Proportional
	}
	return sum, nil
}

// memoryOf returns the memory of the process in the file at path. If it has
// ended the error is fs.ErrNotExist or ESRCH.
func memoryOf(path string) (backend.Memory, error) {
	var p processID
	if err := durable.ReadJSON(path, &p); err != nil {
		return backend.Memory{}, err
	}
	if p.PID <= 1 || p.Boot != BootID() {
		return backend.Memory{}, fs.ErrNotExist
	}
	sizes, err := ReadSizes(fmt.Sprintf("/proc/%d/smaps_rollup", p.PID))
	if err != nil {
		return backend.Memory{}, err
	}
	// Checked after the read: what was read is not that of another process.
	if start, err := hostos.ProcStart(p.PID); err != nil || start != p.Start {
		return backend.Memory{}, fs.ErrNotExist
	}
	// A clean page is page cache of a file, such as that of a saved memory, even if
	// only this process has it mapped: the host can drop it at any time.
	return backend.Memory{
		Unique:       sizes["Private_Dirty"] + sizes["Private_Hugetlb"],
		Shared:       sizes["Private_Clean"] + sizes["Shared_Clean"] + sizes["Shared_Dirty"] + sizes["Shared_Hugetlb"],
		Proportional: sizes["Pss"],
	}, nil
}
