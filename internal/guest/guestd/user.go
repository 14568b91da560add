//go:build linux

package guestd

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/guest/msgcmd"
)

// account is a line of passwd(5) and the groups of group(5).
type account struct {
	name, home, shell string
	uid, gid          uint32
	groups            []uint32
}

func (s *Server) account(name string) (account, error) {
	if name == "" {
		name = s.cfg.User
	}
	a := account{name: name}
	found := false
	err := eachLine(s.path("/etc/passwd"), func(f []string) {
		if found || len(f) < 7 || f[0] != name {
			return
		}
		uid, uerr := strconv.ParseUint(f[2], 10, 32)
		gid, gerr := strconv.ParseUint(f[3], 10, 32)
		if uerr != nil || gerr != nil {
			return
		}
		found = true
		a.uid, a.gid, a.home, a.shell = uint32(uid), uint32(gid), f[5], f[6]
	})
	if err != nil || !found {
		return a, agentlab.Errorf(agentlab.CodeNotFound, "the guest has no user %q", name).WithField("user")
	}
	if a.shell == "" {
		a.shell = "/bin/sh"
	}
	if a.home == "" {
		a.home = "/"
	}
	_ = eachLine(s.path("/etc/group"), func(f []string) { // no file: no further groups
		if len(f) < 4 || !slices.Contains(strings.Split(f[3], ","), name) {
			return
		}
		if gid, err := strconv.ParseUint(f[2], 10, 32); err == nil {
			a.groups = append(a.groups, uint32(gid))
		}
	})
	return a, nil
}

// eachLine calls fn with the colon-separated fields of every line.
func eachLine(name string, fn func([]string)) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		fn(strings.Split(sc.Text(), ":"))
	}
	return sc.Err()
}

// environ returns the environment of a login of a, like login(1) and pam_env.
func (s *Server) environ(a account, term string) []string {
	path := "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
	if a.uid == 0 {
		path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	env := []string{
		"HOME=" + a.home, "USER=" + a.name, "LOGNAME=" + a.name,
		"SHELL=" + a.shell, "PATH=" + path,
	}
	for _, name := range []string{"/etc/default/locale", "/etc/environment"} {
		env = append(env, s.envFile(name)...)
	}
	if term != "" {
		env = append(env, "TERM="+term)
	}
	return s.addPrograms(env, a)
}

// maxBootstrapped is the maximum size of the file with the answer to the
// runner's token.
const maxBootstrapped = 16 << 20

// secretEnv returns the environment that the runner has staged for the agent's
// user, so that an agent that a user starts has its key. It is empty for other
// users, and if nothing is staged.
func (s *Server) secretEnv(a account) map[string]string {
	env := map[string]string{}
	if a.name != s.cfg.User {
		return env
	}
	// The file is the agent's: a link must not reveal another file's content.
	f, err := os.OpenFile(s.path(filepath.Join(secretsDir, bootstrapDoc)), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return env
	}
	defer func() { _ = f.Close() }()
	var staged struct {
		Env map[string]string `json:"env"`
	}
	if json.NewDecoder(io.LimitReader(f, maxBootstrapped)).Decode(&staged) != nil {
		return env
	}
	for k, v := range staged.Env {
		if !strings.ContainsAny(k, "=\x00") && k != "" && !strings.ContainsRune(v, 0) {
			env[k] = v
		}
	}
	return env
}

// addPrograms appends the directory of agentlab-msg and agentlab-lease to the search
// path in env, if a is the agent's user. The last value of a variable in env counts.
func (s *Server) addPrograms(env []string, a account) []string {
	if a.name != s.cfg.User {
		return env
	}
	path := ""
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	if path != "" {
		path += ":"
	}
	return append(env, "PATH="+path+s.path(filepath.Join(secretsDir, msgcmd.Dir)))
}

// envFile reads KEY=value lines, with or without quotes.
func (s *Server) envFile(name string) []string {
	b, err := os.ReadFile(s.path(name))
	if err != nil {
		return nil
	}
	var env []string
	for line := range strings.Lines(string(b)) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "export ")
		k, v, ok := strings.Cut(line, "=")
		if !ok || k == "" || strings.HasPrefix(k, "#") {
			continue
		}
		if n := len(v); n >= 2 && (v[0] == '"' || v[0] == '\'') && v[n-1] == v[0] {
			v = v[1 : n-1]
		}
		env = append(env, k+"="+v)
	}
	return env
}
