package daemon

import (
	"fmt"
	"io"
	"net/netip"
)

// networkSettings prints the bridge of config.yaml as KEY=VALUE lines for
// shell scripts. Names of interfaces are checked, so no value contains blanks
// or quotes. The value of a missing network is empty. It needs no root and
// reads only the file.
func (o runOptions) networkSettings(w io.Writer) error {
	c, err := o.bridge()
	if err != nil {
		return err
	}
	host := func(a netip.Addr, n netip.Prefix) string {
		if !a.IsValid() {
			return ""
		}
		return netip.PrefixFrom(a, n.Bits()).String()
	}
	subnet6 := ""
	if c.Subnet6.IsValid() {
		subnet6 = c.Subnet6.String()
	}
	for _, line := range [][2]string{
		{"bridge", c.Bridge}, {"subnet", c.Subnet4.String()}, {"gateway", host(c.Gateway4, c.Subnet4)},
		{"subnet6", subnet6}, {"gateway6", host(c.Gateway6, c.Subnet6)}, {"uplink", c.Uplink}, {"tailscale", c.Tailscale},
	} {
		if _, err := fmt.Fprintf(w, "%s=%s\n", line[0], line[1]); err != nil {
			return err
		}
	}
	return nil
}
