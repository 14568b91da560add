//go:build linux

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What follows puts a program under those settings of a systemd unit that
// could keep QEMU or an image build from working: capabilities, system calls,
// address families and namespaces. It does to a process what systemd would, on
// machines that do not run systemd.

// envConfine makes the test program confine itself and then become another.
const envConfine = "AGENTLAB_E2E_CONFINE"

// unitSettings are the settings of a unit's [Service] part; several lines of
// one setting are several values.
func unitSettings(path string) (map[string][]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	out, in := map[string][]string{}, false
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			in = line == "[Service]"
		}
		if key, value, ok := strings.Cut(line, "="); ok && in && !strings.HasPrefix(line, "#") {
			out[key] = append(out[key], value)
		}
	}
	return out, nil
}

// confine does not return when all goes well.
func confine(unit string, argv []string) error {
	runtime.LockOSThread() // the settings are this thread's, and its alone is left after execve
	set, err := unitSettings(unit)
	if err != nil {
		return err
	}
	filter, err := seccompFilter(set)
	if err != nil {
		return err
	}
	mask, err := strconv.ParseUint(set["UMask"][0], 8, 32)
	if err != nil {
		return err
	}
	unix.Umask(int(mask))
	if err := keepCapabilities(strings.Fields(strings.Join(set["CapabilityBoundingSet"], " "))); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog))); e != 0 {
		return e
	}
	return unix.Exec(argv[0], argv, os.Environ())
}

var capName = regexp.MustCompile(`(?m)^#define (CAP_[A-Z_]+)\s+(\d+)$`)

func keepCapabilities(names []string) error {
	header, err := os.ReadFile("/usr/include/linux/capability.h")
	if err != nil {
		return err
	}
	keep := map[uintptr]bool{}
	for _, m := range capName.FindAllStringSubmatch(string(header), -1) {
		n, _ := strconv.Atoi(m[2])
		for _, want := range names {
			keep[uintptr(n)] = keep[uintptr(n)] || m[1] == want
		}
	}
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		if keep[c] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return nil
}

// callGroups expands the groups of SystemCallFilter.
func callGroups(names []string, into map[string]bool, value bool) error {
	var groups []string
	for _, name := range names {
		if strings.HasPrefix(name, "@") {
			groups = append(groups, name)
		} else {
			into[name] = value
		}
	}
	if len(groups) == 0 {
		return nil
	}
	out, err := exec.Command("systemd-analyze", append([]string{"syscall-filter", "--no-pager"}, groups...)...).Output()
	if err != nil {
		return fmt.Errorf("systemd-analyze syscall-filter: %w", err)
	}
	var more []string
	for line := range bytes.Lines(out) {
		word := strings.TrimSpace(string(line))
		switch {
		case word == "" || strings.HasPrefix(word, "#") || line[0] != ' ':
		case word[0] == '@':
			more = append(more, word)
		default:
			into[word] = value
		}
	}
	return callGroups(more, into, value)
}

var callNumber = regexp.MustCompile(`(?m)^\s*SYS_([A-Z0-9_]+)\s*=\s*(\d+)$`)

func callNumbers() (map[string]uint32, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_"+runtime.GOARCH+".go"))
	out := map[string]uint32{}
	for _, m := range callNumber.FindAllStringSubmatch(string(text), -1) {
		n, _ := strconv.ParseUint(m[2], 10, 32)
		out[strings.ToLower(m[1])] = uint32(n)
	}
	return out, err
}

var namespaceFlag = map[string]uint32{
	"mnt": unix.CLONE_NEWNS, "pid": unix.CLONE_NEWPID, "net": unix.CLONE_NEWNET, "ipc": unix.CLONE_NEWIPC, "uts": unix.CLONE_NEWUTS,
	"user": unix.CLONE_NEWUSER, "cgroup": unix.CLONE_NEWCGROUP,
}

var families = map[string]uint32{"AF_UNIX": unix.AF_UNIX, "AF_INET": unix.AF_INET, "AF_INET6": unix.AF_INET6, "AF_NETLINK": unix.AF_NETLINK}

// seccompFilter is what systemd would load for a unit's settings.
func seccompFilter(set map[string][]string) ([]unix.SockFilter, error) {
	allowed := map[string]bool{}
	if err := callGroups([]string{"@default"}, allowed, true); err != nil {
		return nil, err
	}
	for _, value := range set["SystemCallFilter"] {
		rest, deny := strings.CutPrefix(value, "~")
		if err := callGroups(strings.Fields(rest), allowed, !deny); err != nil {
			return nil, err
		}
	}
	if set["ProtectHostname"] != nil {
		allowed["sethostname"], allowed["setdomainname"] = false, false
	}
	numbers, err := callNumbers()
	if err != nil {
		return nil, err
	}
	const (
		load = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		jeq  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		jge  = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		jgt  = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
		jset = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		ret  = unix.BPF_RET | unix.BPF_K
	)
	yes, no := uint32(unix.SECCOMP_RET_ALLOW), unix.SECCOMP_RET_ERRNO|uint32(syscall.EPERM)
	p := []unix.SockFilter{{Code: load, K: 0}} // the number of the call
	block := func(call string, inner ...unix.SockFilter) {
		p = append(p, unix.SockFilter{Code: jeq, K: numbers[call], Jf: uint8(len(inner))})
		p = append(p, inner...)
	}
	// Namespaces: clone3 hides its flags in memory, so callers must fall back.
	block("clone3", unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(syscall.ENOSYS)})
	var forbidden uint32
	for name, flag := range namespaceFlag {
		if !strings.Contains(" "+strings.Join(set["RestrictNamespaces"], " ")+" ", " "+name+" ") {
			forbidden |= flag
		}
	}
	for _, call := range []string{"clone", "unshare"} {
		block(call, unix.SockFilter{Code: load, K: 16}, unix.SockFilter{Code: jset, K: forbidden, Jf: 1},
			unix.SockFilter{Code: ret, K: no}, unix.SockFilter{Code: ret, K: yes})
	}
	socket := []unix.SockFilter{{Code: load, K: 16}}
	for _, name := range strings.Fields(strings.Join(set["RestrictAddressFamilies"], " ")) {
		socket = append(socket, unix.SockFilter{Code: jeq, K: families[name], Jf: 1}, unix.SockFilter{Code: ret, K: yes})
	}
	block("socket", append(socket, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(syscall.EAFNOSUPPORT)})...)
	var list []uint32
	for name, ok := range allowed {
		if n, known := numbers[name]; ok && known {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	for i := 0; i < len(list); { // by ranges: every system call goes through this
		lo, hi := list[i], list[i]
		for i++; i < len(list) && list[i] == hi+1; i++ {
			hi++
		}
		p = append(p, unix.SockFilter{Code: jge, K: lo, Jf: 2}, unix.SockFilter{Code: jgt, K: hi, Jt: 1}, unix.SockFilter{Code: ret, K: yes})
	}
	return append(p, unix.SockFilter{Code: ret, K: no}), nil
}
