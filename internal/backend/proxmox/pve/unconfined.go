package pve

import "os"

// systemdRunning exists if systemd is process 1.
const systemdRunning = "/run/systemd/system"

// Unconfined returns the Prefix for a process that is a systemd service. Child
// processes inherit the restrictions of its unit, but Proxmox's programs need
// the devices of storages, the cluster file system and the machine's own
// mounts, and the VMs that they start must inherit nothing of the service.
// With the Prefix systemd itself runs each program in a separate unit, which
// continues when this process is killed or restarted. It returns nil if this
// process is not a service.
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
