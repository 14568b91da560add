package hostscripts

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
)

func itoa(n int) string { return strconv.Itoa(n) }

// exitCode is what a stand-in ends with.
type exitCode int

func (e exitCode) Error() string { return "exit " + itoa(int(e)) }

// standIn runs one. What the real program does not have is code 255, which no
// script may take for an answer.
func standIn(f func([]string) error, args []string) int {
	err := f(args)
	if code, ok := errors.AsType[exitCode](err); ok {
		return int(code)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 255
	}
	return 0
}

func unknown(args []string) error { return fmt.Errorf("no such command or option: %q", args) }

// is matches arguments against words; "*" is any one word that is no option.
func is(args []string, words ...string) bool {
	return slices.EqualFunc(args, words, func(a, w string) bool { return a == w || w == "*" && a != "" && a[0] != '-' })
}

// runuser runs a program, which is root's here.
func runuser(args []string) error {
	if len(args) < 4 || args[0] != "-u" || args[2] != "--" {
		return unknown(args)
	}
	cmd := exec.Command(args[3], args[4:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return exitCode(1)
	}
	return nil
}

// systemctl keeps which units are enabled and which run below /run/systemd, and
// really starts what a unit's ExecStart says.
func systemctl(args []string) error {
	enabled := func(unit string) string { return "/run/systemd/system/enabled-" + unit }
	pidFile := func(unit string) string { return "/run/systemd/system/pid-" + unit }
	has := func(unit string) error {
		if _, err := os.Stat("/etc/systemd/system/" + unit); err != nil {
			return fmt.Errorf("Failed: Unit file %s does not exist.", unit)
		}
		return nil
	}
	running := func(unit string) int {
		text, _ := os.ReadFile(pidFile(unit))
		pid, _ := strconv.Atoi(string(text))
		if pid > 0 && guard.Alive(pid) {
			return pid
		}
		return 0
	}
	stop := func(unit string) {
		if pid := running(unit); pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGTERM)
			for deadline := time.Now().Add(guard.Patience); running(unit) > 0 && time.Now().Before(deadline); {
				time.Sleep(5 * time.Millisecond)
			}
		}
		_ = os.Remove(pidFile(unit))
	}
	switch {
	case is(args, "daemon-reload"):
		return nil
	case is(args, "enable", "*"):
		return errors.Join(has(args[1]), os.WriteFile(enabled(args[1]), nil, 0o600))
	case is(args, "disable", "--now", "*"):
		stop(args[2])
		_ = os.Remove(enabled(args[2]))
		return has(args[2])
	case is(args, "is-enabled", "-q", "*"):
		if _, err := os.Stat(enabled(args[2])); err != nil {
			return exitCode(1)
		}
		return nil
	case is(args, "is-active", "-q", "*"):
		if running(args[2]) == 0 {
			return exitCode(3)
		}
		return nil
	case is(args, "status", "--no-pager", "--lines=20", "*"):
		return exitCode(3)
	case is(args, "restart", "*"):
		if err := has(args[1]); err != nil {
			return err
		}
		stop(args[1])
		return start(args[1], pidFile(args[1]))
	}
	return unknown(args)
}

// start runs a unit of type notify until it answers.
func start(unit, pidFile string) error {
	text, err := os.ReadFile("/etc/systemd/system/" + unit)
	if err != nil {
		return err
	}
	_, line, _ := strings.Cut(string(text), "\nExecStart=")
	line, _, _ = strings.Cut(line, "\n")
	argv := strings.Fields(line)
	if len(argv) == 0 || !strings.Contains(string(text), "\nType=notify\n") {
		return fmt.Errorf("%s is not what this stand-in starts", unit)
	}
	notify := filepath.Join("/run/systemd", "notify")
	_ = os.Remove(notify)
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	log, err := os.Create("/run/systemd/log-" + unit)
	if err != nil {
		return err
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "NOTIFY_SOCKET=" + notify}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); _ = conn.SetReadDeadline(time.Unix(1, 0)); close(ended) }()
	_ = conn.SetReadDeadline(time.Now().Add(guard.Patience))
	buf := make([]byte, 4096)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			said, _ := os.ReadFile(log.Name())
			return fmt.Errorf("Job for %s failed: %s", unit, said)
		}
		if strings.Contains(string(buf[:n]), "READY=1") {
			return os.WriteFile(pidFile, []byte(itoa(cmd.Process.Pid)), 0o600)
		}
	}
}

// stanza is what /etc/network/interfaces says of an interface, as ifupdown2
// reads it.
func stanza(name string) (addresses []string, bridge bool, err error) {
	text, err := os.ReadFile("/etc/network/interfaces")
	if err != nil {
		return nil, false, err
	}
	lines := strings.Split(string(text), "\n")
	if slices.Contains(lines, "source /etc/network/interfaces.d/*") {
		files, _ := filepath.Glob("/etc/network/interfaces.d/*")
		for _, f := range files {
			more, err := os.ReadFile(f)
			if err != nil {
				return nil, false, err
			}
			lines = append(lines, strings.Split(string(more), "\n")...)
		}
	}
	current, found := "", false
	for _, line := range lines {
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || f[0][0] == '#' || f[0] == "source":
		case f[0] == "auto" && len(f) == 2:
		case f[0] == "iface" && len(f) == 4 && (f[2] == "inet" || f[2] == "inet6") && (f[3] == "static" || f[3] == "loopback" || f[3] == "manual"):
			current = f[1]
			found = found || current == name
		case f[0] == "address" && len(f) == 2:
			if current == name {
				addresses = append(addresses, f[1])
			}
		case f[0] == "bridge-ports" && len(f) == 2:
			bridge = bridge || current == name
		case f[0] == "bridge-stp" || f[0] == "bridge-fd" || f[0] == "gateway":
		default:
			return nil, false, fmt.Errorf("error: /etc/network/interfaces: unknown line %q", line)
		}
	}
	if !found {
		return nil, false, fmt.Errorf("error: cannot find interface %s", name)
	}
	return addresses, bridge, nil
}

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %q: %s", args, out)
	}
	return nil
}

func ifup(args []string) error {
	if !is(args, "*") {
		return unknown(args)
	}
	addresses, bridge, err := stanza(args[0])
	if err != nil || !bridge {
		return errors.Join(err, unknown(args))
	}
	if _, err := net.InterfaceByName(args[0]); err != nil {
		if err := ip("link", "add", args[0], "type", "bridge"); err != nil {
			return err
		}
	}
	err = ip("link", "set", args[0], "up")
	for _, a := range addresses {
		err = errors.Join(err, ip("addr", "replace", a, "dev", args[0]))
	}
	return err
}

func ifdown(args []string) error {
	if !is(args, "*") {
		return unknown(args)
	}
	if _, _, err := stanza(args[0]); err != nil {
		return err
	}
	return ip("link", "delete", args[0])
}

// tailscaleState is what /run/tailscale.json holds.
type tailscaleState struct {
	State           string
	AdvertiseRoutes []string
	Approved        []string
}

func tailscale(args []string) error {
	var s tailscaleState
	text, err := os.ReadFile("/run/tailscale.json")
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return fmt.Errorf("failed to connect to local tailscaled; %w", err)
	}
	show := func(v any) error {
		out, err := json.MarshalIndent(v, "", "  ")
		fmt.Println(string(out))
		return err
	}
	routes, set := "", false
	if len(args) == 2 {
		routes, set = strings.CutPrefix(args[1], "--advertise-routes=")
	}
	switch {
	case is(args, "status", "--json"):
		return show(struct {
			Version, BackendState string
			Self                  any
			Peer                  any
		}{"1.80.2", s.State, map[string]any{"HostName": "pve", "AllowedIPs": append([]string{"100.64.0.7/32"}, s.Approved...)},
			map[string]any{"key": map[string]any{"AllowedIPs": []string{"100.64.0.8/32", "10.77.0.0/16"}}}})
	case is(args, "debug", "prefs"):
		return show(map[string]any{"ControlURL": "https://controlplane.tailscale.com", "AdvertiseRoutes": s.AdvertiseRoutes, "WantRunning": true})
	case is(args, "ip", "-4"):
		fmt.Println("100.64.0.7")
		return nil
	case set && args[0] == "set":
		s.AdvertiseRoutes = nil
		if routes != "" {
			s.AdvertiseRoutes = strings.Split(routes, ",")
		}
		for _, r := range s.AdvertiseRoutes {
			if _, _, err := net.ParseCIDR(r); err != nil {
				return fmt.Errorf("%q is not a valid IP address or CIDR prefix", r)
			}
		}
		out, err := json.Marshal(s)
		return errors.Join(err, os.WriteFile("/run/tailscale.json", out, 0o600))
	}
	return unknown(args)
}
