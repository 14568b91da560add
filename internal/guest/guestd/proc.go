//go:build linux

package guestd

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// command prepares req as a process of a, the leader of a new session.
func (s *Server) command(req guestapi.ExecRequest, a account) (*exec.Cmd, error) {
	term := ""
	if req.TTY {
		term = req.Term
		if term == "" {
			term = "xterm-256color"
		}
	}
	env := s.environ(a, term)
	for _, k := range slices.Sorted(maps.Keys(req.Env)) {
		v := req.Env[k]
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q cannot be an environment variable", k).WithField("env")
		}
		env = append(env, k+"="+v)
	}
	for _, arg := range req.Command {
		if strings.ContainsRune(arg, 0) {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "an argument contains a NUL byte").WithField("command")
		}
	}
	dir := req.Dir
	switch {
	case dir == "":
		dir = a.home
		if _, err := os.Stat(dir); err != nil {
			dir = "/"
		}
	case !filepath.IsAbs(dir):
		dir = filepath.Join(a.home, dir)
	}
	cmd := &exec.Cmd{Env: env, Dir: dir, SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	if len(req.Command) == 0 {
		cmd.Path, cmd.Args = a.shell, []string{"-" + filepath.Base(a.shell)}
	} else {
		cmd.Args = req.Command
		cmd.Path, cmd.Err = lookPath(req.Command[0], dir, env)
	}
	if euid := os.Geteuid(); euid == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: a.uid, Gid: a.gid, Groups: a.groups}
	} else if uint32(euid) != a.uid {
		return nil, agentlab.Errorf(agentlab.CodeDenied, "only root can run commands as %q", a.name).WithField("user")
	}
	return cmd, nil
}

// lookPath finds a program as execvp(3) does: in the PATH of env, the last
// one given.
func lookPath(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		return name, nil // Start checks whether it exists
	}
	path := ""
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	denied := ""
	for _, d := range filepath.SplitList(path) {
		p := filepath.Join(d, name)
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		fi, err := os.Stat(p)
		switch {
		case err != nil || fi.IsDir():
		case fi.Mode()&0o111 == 0:
			denied = p
		default:
			return p, nil
		}
	}
	if denied != "" {
		return denied, nil
	}
	return "", exec.ErrNotFound
}

// startCmd starts cmd in the slice of users, and without the server's protection from
// the kernel's OOM killer.
func (s *Server) startCmd(cmd *exec.Cmd) error {
	s.slice.Add(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = os.WriteFile("/proc/"+strconv.Itoa(cmd.Process.Pid)+"/oom_score_adj", []byte("0"), 0o600)
	return nil
}

// startFailure returns the exit status that shells use for a command that
// cannot be started: 127 if it does not exist, 126 if it cannot be run.
func startFailure(cmd *exec.Cmd, err error) stream.ExitStatus {
	name := cmd.Args[0]
	if pe, ok := errors.AsType[*fs.PathError](dirError(cmd.Dir)); ok {
		return stream.ExitStatus{Code: 126, Error: "directory " + cmd.Dir + ": " + pe.Err.Error()}
	}
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return stream.ExitStatus{Code: 127, Error: name + ": command not found"}
	case errors.Is(err, fs.ErrNotExist):
		return stream.ExitStatus{Code: 127, Error: name + ": no such file or directory"}
	case errors.Is(err, fs.ErrPermission):
		return stream.ExitStatus{Code: 126, Error: name + ": permission denied"}
	default:
		return stream.ExitStatus{Code: 126, Error: name + ": " + err.Error()}
	}
}

func dirError(dir string) error {
	_, err := os.Stat(dir)
	return err
}

// exitStatus returns the exit status of a process as a shell reports it.
func exitStatus(ps *os.ProcessState) stream.ExitStatus {
	ws, ok := ps.Sys().(syscall.WaitStatus)
	if ok && ws.Signaled() {
		name := strings.TrimPrefix(unix.SignalName(ws.Signal()), "SIG")
		return stream.ExitStatus{Code: 128 + int(ws.Signal()), Signal: name}
	}
	return stream.ExitStatus{Code: ps.ExitCode()}
}

// signalByName sends the signal "SIG"+name to the process group of pid, unless
// done is closed: then the process has ended and the PID may be another's.
func signalByName(pid int, done <-chan struct{}, name string) {
	select {
	case <-done:
		return
	default:
	}
	if sig := unix.SignalNum("SIG" + name); sig != 0 {
		_ = syscall.Kill(-pid, sig)
	}
}

// killSession ends every process of a session: with SIGHUP and SIGTERM, and
// with SIGKILL after grace. It returns when none is left or ctx ends.
func killSession(ctx context.Context, sid int, grace time.Duration) {
	send := func(sigs ...syscall.Signal) bool {
		pids := sessionPIDs(sid)
		for _, pid := range pids {
			for _, sig := range sigs {
				_ = syscall.Kill(pid, sig)
			}
		}
		return len(pids) > 0
	}
	if !send(syscall.SIGHUP, syscall.SIGCONT, syscall.SIGTERM) {
		return
	}
	kill := time.After(grace)
	t := time.NewTicker(50 * time.Millisecond)
	defer t.Stop()
	hard := false
	for {
		select {
		case <-kill:
			hard = true
		case <-ctx.Done():
			send(syscall.SIGKILL)
			return
		case <-t.C:
		}
		if hard {
			if !send(syscall.SIGKILL) {
				return
			}
		} else if len(sessionPIDs(sid)) == 0 {
			return
		}
	}
}

// sessionPIDs lists the living processes whose session is sid.
func sessionPIDs(sid int) []int {
	d, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer func() { _ = d.Close() }()
	names, _ := d.Readdirnames(-1)
	var pids []int
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		f, _ := hostos.ProcStat(pid) // state ppid pgrp session …
		if len(f) > 3 && f[3] == strconv.Itoa(sid) && f[0] != "Z" {
			pids = append(pids, pid)
		}
	}
	return pids
}
