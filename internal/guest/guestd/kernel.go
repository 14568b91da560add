//go:build linux

package guestd

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Kernel is the part of an identity that is not in files.
type Kernel interface {
	SetTime(t time.Time) error
	// Uptime returns the time since the boot.
	Uptime() time.Duration
	// AddEntropy credits p to the kernel's generator and reseeds it at once:
	// otherwise clones of one template would generate the same first bytes.
	AddEntropy(p []byte) error
	SetHostname(name string) error
	Hostname() (string, error)
	// ConfigureNetwork sets addresses, routes and MTU of the single network
	// device. It waits up to wait for the device.
	ConfigureNetwork(n guestapi.Network, wait time.Duration) error
	// SetBootID mounts file on the kernel's file with the boot ID. Unprivileged
	// users can still mount file systems of type proc in their namespaces.
	SetBootID(file, kernel string) error
	// GrowRoot extends the root file system to the end of its disk, which it waits
	// for to have least bytes, and returns the size of the disk.
	GrowRoot(least int64, wait time.Duration) (int64, error)
	// LoadKVM loads the module of KVM, and tests whether a virtual machine can be
	// created.
	LoadKVM() agentlab.NestedState
	// ShareKVM lets the members of a group open /dev/kvm.
	ShareKVM(gid int) error
	// Sync writes all file systems to their disks.
	Sync()
	// Reboot stops the machine at once: "poweroff" or "reboot".
	Reboot(action string) error
}

type linuxKernel struct{}

func (linuxKernel) SetTime(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

func (linuxKernel) Uptime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // never fails
	return time.Duration(ts.Nano())
}

func (linuxKernel) AddEntropy(p []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	// struct rand_pool_info: entropy in bits, size in bytes, the bytes.
	info := binary.NativeEndian.AppendUint32(nil, uint32(len(p)*8))
	info = binary.NativeEndian.AppendUint32(info, uint32(len(p)))
	info = append(info, p...)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info[0]))); errno != 0 {
		return os.NewSyscallError("RNDADDENTROPY", errno)
	}
	const rndReseedCRNG = 0x5207
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0); errno != 0 {
		return os.NewSyscallError("RNDRESEEDCRNG", errno)
	}
	return nil
}

func (linuxKernel) SetHostname(name string) error { return unix.Sethostname([]byte(name)) }
func (linuxKernel) Hostname() (string, error)     { return os.Hostname() }

func (linuxKernel) ConfigureNetwork(n guestapi.Network, wait time.Duration) error {
	link, err := ethernet(wait)
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(n.Address)
	if err != nil {
		return err
	}
	if n.MTU > 0 && link.Attrs().MTU != n.MTU {
		if err := netlink.LinkSetMTU(link, n.MTU); err != nil {
			return err
		}
	}
	useIPv6 := prepareIPv6(link.Attrs().Name, n.Address6 != "")
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	if err := setAddress(link, netlink.FAMILY_V4, addr, n.Gateway); err != nil || !useIPv6 {
		return err
	}
	addr6, err := netlink.ParseAddr(n.Address6)
	if err != nil {
		return err
	}
	addr6.Flags = unix.IFA_F_NODAD // the guest is alone on the link
	return setAddress(link, netlink.FAMILY_V6, addr6, n.Gateway6)
}

// prepareIPv6 makes the device's IPv6 as static as its IPv4. It reports
// whether the kernel has IPv6: it may be left out or disabled.
func prepareIPv6(device string, want bool) bool {
	conf := "/proc/sys/net/ipv6/conf/" + device + "/"
	if _, err := os.Stat(conf); err != nil {
		return false
	}
	set := func(name, value string) bool { return os.WriteFile(conf+name, []byte(value), 0o644) == nil }
	if !want {
		set("disable_ipv6", "1")
		return false
	}
	set("accept_ra", "0")
	set("autoconf", "0")
	set("router_solicitations", "0")
	set("accept_dad", "0") // the guest is alone on the link
	return set("disable_ipv6", "0")
}

// setAddress sets addr as the device's only address of a family, except the
// link-local one of IPv6, and gateway as its default gateway.
func setAddress(link netlink.Link, family int, addr *netlink.Addr, gateway string) error {
	old, err := netlink.AddrList(link, family)
	if err != nil {
		return err
	}
	for _, a := range old {
		if !a.Equal(*addr) && (family == netlink.FAMILY_V4 || !a.IP.IsLinkLocalUnicast()) {
			if err := netlink.AddrDel(link, &a); err != nil {
				return err
			}
		}
	}
	if err := netlink.AddrReplace(link, addr); err != nil {
		return err
	}
	if gateway == "" {
		return nil
	}
	return netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(gateway)})
}

// ethernet returns the network device: eth0, otherwise the first device with a
// MAC address that is not a loopback.
func ethernet(wait time.Duration) (netlink.Link, error) {
	deadline := time.Now().Add(wait)
	for {
		if l, err := netlink.LinkByName("eth0"); err == nil {
			return l, nil
		}
		links, err := netlink.LinkList()
		if err != nil {
			return nil, err
		}
		for _, l := range links {
			at := l.Attrs()
			if at.Flags&net.FlagLoopback == 0 && len(at.HardwareAddr) == 6 && l.Type() == "device" {
				return l, nil
			}
		}
		if time.Now().After(deadline) {
			return nil, errors.New("the guest has no network device")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (linuxKernel) SetBootID(file, kernel string) error {
	if err := mountWholeProc(); err != nil {
		return err
	}
	return unix.Mount(file, kernel, "", unix.MS_BIND, "")
}

// Only root can enter procDir. It is not in runDir, where programs search files.
const (
	procDir   = "/run/agentlab-proc"
	procMount = procDir + "/proc"
)

// mountWholeProc mounts another file system of type proc. In a user namespace the
// kernel allows a new one only if an existing one has no mounts on its files, and
// with the boot ID /proc has one. bubblewrap and rootless containers need it.
func mountWholeProc() error {
	if err := os.MkdirAll(procMount, 0o700); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(procMount, &st); err != nil || st.Type == unix.PROC_SUPER_MAGIC {
		return err
	}
	return unix.Mount("proc", procMount, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RELATIME, "")
}

func (linuxKernel) GrowRoot(least int64, wait time.Duration) (int64, error) {
	return Grow("/", least, wait)
}

func (linuxKernel) Sync() { unix.Sync() }

func (linuxKernel) Reboot(action string) error {
	unix.Sync()
	if action == "reboot" {
		return unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	}
	return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// validNetwork returns an error for an invalid configuration, before anything
// is changed.
func validNetwork(n guestapi.Network) error {
	if _, err := netip.ParsePrefix(n.Address); err != nil {
		return err
	}
	if n.Address6 != "" {
		if _, err := netip.ParsePrefix(n.Address6); err != nil {
			return err
		}
	}
	for _, a := range append([]string{n.Gateway, n.Gateway6}, n.DNS...) {
		if a == "" {
			continue
		}
		if _, err := netip.ParseAddr(a); err != nil {
			return err
		}
	}
	if n.MTU != 0 && (n.MTU < 576 || n.MTU > 65535) {
		return errors.New("the MTU is out of range")
	}
	return nil
}

// resolvConf returns resolv.conf(5) for n.
func resolvConf(n guestapi.Network) string {
	var b strings.Builder
	for _, a := range n.DNS {
		b.WriteString("nameserver " + a + "\n")
	}
	return b.String()
}
