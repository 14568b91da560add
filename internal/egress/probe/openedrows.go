package probe

// HostName is the name under which guests reach the host itself.
const HostName = "host.agentlab.internal"

// opened adds the rows of private destinations that the operator allows: only
// they are reached.
func (t *table) opened() {
	o := t.tgt.Opened
	if o.Name == "" {
		return
	}
	reach := func(id, shows string, attempts ...attempt) {
		t.add(Check{ID: id, Shows: shows, Want: Reach, Opened: true}, attempts...)
	}
	a := o.Address
	reach("private-address", "a private address that the operator opened is reached", tcpTo(a.String()))
	if a6 := o.Address6; a6.IsValid() {
		t.add(Check{ID: "private-address6", Shows: "a unique local address that the operator opened is reached", Want: Reach, IPv6: true}, tcpTo(a6.String()))
		t.add(Check{ID: "private-port6", Shows: "no other port of it is reached", Want: Closed, Rule: ruleULA, IPv6: true}, tcpTo(at(a6.Addr(), a6.Port()+1)))
	}
	reach("private-name", "a private name that the operator opened is reached", tcpTo(o.Name+":"+itoa(o.Port)))
	reach("private-tls", "a private name that the operator opened is reached with TLS", named("tls", o.Name+":443", o.Name))
	t.add(Check{ID: "private-sni", Shows: "another name is refused at an opened name's address", Want: Block, Rule: ruleNameMismatch, Said: "wiki." + o.Name, Shared: true, Names: true, Opened: true},
		named("tls", o.Name+":443", "wiki."+o.Name))
	t.add(Check{ID: "private-port", Shows: "no other port of an opened private address is reached, and only TCP", Want: Closed, Rule: rulePrivate},
		tcpTo(at(a.Addr(), a.Port()+1)), udpTo(a.String()), ping(a.Addr().String()))
	t.add(Check{ID: "private-beside", Shows: "the address beside an opened private one is not reached", Want: Closed, Rule: rulePrivate},
		tcpTo(at(a.Addr().Next(), a.Port())))
	t.add(Check{ID: "private-below", Shows: "a name below an opened private name is not resolved", Want: Block, Rule: rulePrivate, Said: "wiki." + o.Name},
		question("wiki."+o.Name, "A"))
	for _, n := range o.Rebound {
		t.add(Check{ID: "private-rebind-" + firstLabel(n), Shows: "an opened private name does not lead to what the operator cannot open (" + firstLabel(n) + ")", Want: Block, Rule: ruleRebinding},
			question(n, "A"))
	}
	if gw := t.env.Gateway4; gw.IsValid() && o.HostPort != 0 {
		reach("private-host", "a port of the host that the operator opened is reached", tcpTo(HostName+":"+itoa(o.HostPort)))
		t.add(Check{ID: "private-host-port", Shows: "no other port of the host is reached", Want: Closed, Rule: ruleController}, tcpTo(at(gw, o.HostPort+1)))
	}
}

func firstLabel(name string) string {
	for i, c := range name {
		if c == '.' {
			return name[:i]
		}
	}
	return name
}
