package pve

import "os"

// systemdRunning is there where systemd is process 1.
const systemdRunning = "/run/systemd/system"

// Unconfined is the Prefix for a process that is a service of systemd: its
// unit confines it, and what it starts inherits that, but Proxmox's programs
// need the devices of storages, the cluster file system and the machine's own
// mounts, and the VMs that they start are to have nothing of ours. With it
// systemd itself runs each program, in a unit of its own, which goes on when
// this process is killed or restarted. nil where this process is no service.
func Unconfined(getenv func(string) string) []string {
	if getenv("INVOCATION_ID") == "" {
		return nil
	}
	if _, err := os.Stat(systemdRunning); err != nil {
		return nil
	}
	argv := []string{"systemd-run", "--quiet", "--pipe", "--wait", "--collect", "--service-type=exec", "--description=AgentLab: call of Proxmox VE"}
	for _, e := range programEnv {
		argv = append(argv, "--setenv="+e)
	}
	return append(argv, "--")
}
