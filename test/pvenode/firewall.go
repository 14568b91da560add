package pvenode

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// fwFile is one file of the firewall, of a VM or of the cluster. Node.mu
// guards it. The node keeps rules and never applies them.
type fwFile struct {
	options    map[string]string
	optionKeys []string // in the order in which they came
	ipsets     []*fwSet
	rules      []fwRule
	groups     []*fwGroup
}

type fwSet struct {
	name, comment string
	cidrs         []string
}

type fwGroup struct {
	name, comment string
	rules         []fwRule
}

// fwRule is a rule's fields as they were given.
type fwRule map[string]string

func (n *Node) fwOf(name string) *fwFile {
	f := n.fw[name]
	if f == nil {
		f = &fwFile{options: map[string]string{}}
		n.fw[name] = f
	}
	return f
}

// clone is the file of a VM's clone.
func (f *fwFile) clone() *fwFile {
	c := &fwFile{options: map[string]string{}, optionKeys: slices.Clone(f.optionKeys), rules: slices.Clone(f.rules)}
	for k, v := range f.options {
		c.options[k] = v
	}
	for _, s := range f.ipsets {
		c.ipsets = append(c.ipsets, &fwSet{s.name, s.comment, slices.Clone(s.cidrs)})
	}
	return c
}

// FirewallFile returns the text of a file of the firewall: "cluster" or a
// VMID. "" when there is none.
func (n *Node) FirewallFile(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := n.fw[name]
	if f == nil {
		return ""
	}
	return f.text()
}

// FirewallFiles returns the names of the files of the firewall, sorted.
func (n *Node) FirewallFiles() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for name, f := range n.fw {
		if f.text() != "" {
			out = append(out, name+".fw")
		}
	}
	slices.Sort(out)
	return out
}

func (f *fwFile) text() string {
	var b strings.Builder
	if len(f.options) > 0 {
		b.WriteString("[OPTIONS]\n\n")
		for _, k := range f.optionKeys {
			fmt.Fprintf(&b, "%s: %s\n", k, f.options[k])
		}
		b.WriteByte('\n')
	}
	for _, s := range f.ipsets {
		fmt.Fprintf(&b, "[IPSET %s]%s\n\n", s.name, hashComment(s.comment))
		for _, c := range s.cidrs {
			b.WriteString(c + "\n")
		}
		b.WriteByte('\n')
	}
	if len(f.rules) > 0 {
		b.WriteString("[RULES]\n\n" + rulesText(f.rules) + "\n")
	}
	for _, g := range f.groups {
		fmt.Fprintf(&b, "[group %s]%s\n\n%s\n", g.name, hashComment(g.comment), rulesText(g.rules))
	}
	return b.String()
}

func hashComment(s string) string {
	if s == "" {
		return ""
	}
	return " # " + s
}

func rulesText(rules []fwRule) string {
	var b strings.Builder
	for _, r := range rules {
		if r["enable"] != "1" {
			b.WriteByte('|')
		}
		b.WriteString(strings.ToUpper(r["type"]) + " " + r["action"])
		for _, f := range [][2]string{{"iface", "i"}, {"macro", "macro"}, {"source", "source"}, {"dest", "dest"}, {"proto", "p"},
			{"dport", "dport"}, {"sport", "sport"}, {"log", "log"}, {"icmp-type", "icmp-type"}} {
			if v := r[f[0]]; v != "" {
				b.WriteString(" -" + f[1] + " " + v)
			}
		}
		b.WriteString(hashComment(r["comment"]) + "\n")
	}
	return b.String()
}

func digestOf(text string) string {
	sum := sha1.Sum([]byte(text))
	return hex.EncodeToString(sum[:])
}

var (
	policies  = []string{"ACCEPT", "REJECT", "DROP"}
	groupRe   = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9\-_]+$`)
	fwOptions = []param{
		{name: "enable", kind: kBool}, {name: "macfilter", kind: kBool}, {name: "dhcp", kind: kBool}, {name: "ndp", kind: kBool},
		{name: "radv", kind: kBool}, {name: "ipfilter", kind: kBool}, {name: "policy_in", enum: policies}, {name: "policy_out", enum: policies},
		{name: "log_level_in"}, {name: "log_level_out"}, {name: "delete"}, {name: "digest"},
	}
	fwClusterOptions = []param{
		{name: "enable", kind: kInt, min: f64(0)}, {name: "ebtables", kind: kBool}, {name: "policy_in", enum: policies},
		{name: "policy_out", enum: policies}, {name: "log_ratelimit"}, {name: "delete"}, {name: "digest"},
	}
	fwRuleParams = []param{
		{name: "type", need: true, enum: []string{"in", "out", "forward", "group"}},
		{name: "action", need: true, pattern: groupRe, minLen: 2, maxLen: 20}, {name: "enable", kind: kInt, min: f64(0)},
		{name: "pos", kind: kInt, min: f64(0)}, {name: "iface"}, {name: "macro"}, {name: "source"}, {name: "dest"}, {name: "proto"},
		{name: "dport"}, {name: "sport"}, {name: "comment"}, {name: "log"}, {name: "icmp-type"}, {name: "digest"},
	}
	fwGroupName = param{name: "group", need: true, pattern: groupRe, minLen: 2, maxLen: 18}
	fwSetName   = param{name: "name", need: true, pattern: groupRe, minLen: 2, maxLen: 64}
	fwCIDR      = param{name: "cidr", need: true}
)

func fwAudit(c *call) *Error      { return c.need("/vms/"+c.p.str("vmid"), "VM.Audit") }
func fwNetwork(c *call) *Error    { return c.need("/vms/"+c.p.str("vmid"), "VM.Config.Network") }
func fwRootAudit(c *call) *Error  { return c.need("/", "Sys.Audit") }
func fwRootModify(c *call) *Error { return c.need("/", "Sys.Modify") }

const vmFirewall = "/nodes/{node}/qemu/{vmid}/firewall"

var firewallTable = []endpoint{
	{method: "GET", path: vmFirewall + "/options", perm: fwAudit, run: apiFwOptions},
	{method: "PUT", path: vmFirewall + "/options", perm: fwNetwork, run: apiFwSetOptions, params: fwOptions},
	{method: "GET", path: vmFirewall + "/rules", perm: fwAudit, run: apiFwRules},
	{method: "POST", path: vmFirewall + "/rules", perm: fwNetwork, run: apiFwAddRule, params: fwRuleParams},
	{method: "DELETE", path: vmFirewall + "/rules/{pos}", perm: fwNetwork, run: apiFwDeleteRule, params: []param{{name: "digest"}}},
	{method: "GET", path: vmFirewall + "/ipset", perm: fwAudit, run: apiFwSets},
	{method: "POST", path: vmFirewall + "/ipset", perm: fwNetwork, run: apiFwAddSet, params: []param{fwSetName, pComment}},
	{method: "POST", path: vmFirewall + "/ipset/{name}", perm: fwNetwork, run: apiFwAddCIDR, params: []param{fwSetName, fwCIDR, pComment, {name: "nomatch", kind: kBool}}},
	{method: "GET", path: "/cluster/firewall/options", perm: fwRootAudit, run: apiFwOptions},
	{method: "PUT", path: "/cluster/firewall/options", perm: fwRootModify, run: apiFwSetOptions, params: fwClusterOptions},
	{method: "GET", path: "/cluster/firewall/groups", run: apiFwGroups},
	{method: "POST", path: "/cluster/firewall/groups", perm: fwRootModify, run: apiFwAddGroup, params: []param{fwGroupName, pComment, {name: "rename"}, {name: "digest"}}},
	{method: "GET", path: "/cluster/firewall/groups/{group}", perm: fwRootAudit, run: apiFwRules, params: []param{fwGroupName}},
	{method: "POST", path: "/cluster/firewall/groups/{group}", perm: fwRootModify, run: apiFwAddRule, params: append([]param{fwGroupName}, fwRuleParams...)},
	{method: "DELETE", path: "/cluster/firewall/groups/{group}", perm: fwRootModify, run: apiFwDeleteGroup, params: []param{fwGroupName}},
}

// fwFileOf is the file that a call is about; mu is held.
func (c *call) fwFileOf() (*fwFile, *Error) {
	if !c.p.has("vmid") {
		return c.n.fwOf("cluster"), nil
	}
	// The real node does not look whether there is such a VM.
	return c.n.fwOf(c.p.str("vmid")), nil
}

func apiFwOptions(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f, err := c.fwFileOf()
	if err != nil {
		return nil, err
	}
	out := map[string]any{"digest": digestOf(f.text())}
	for k, v := range f.options {
		if v == "0" || v == "1" {
			out[k] = atoi(v)
			continue
		}
		out[k] = v
	}
	return out, nil
}

func apiFwSetOptions(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f, err := c.fwFileOf()
	if err != nil {
		return nil, err
	}
	for _, k := range c.p.list("delete") {
		delete(f.options, k)
		f.optionKeys = slices.DeleteFunc(f.optionKeys, func(s string) bool { return s == k })
	}
	for _, k := range sortedKeys(c.p) {
		if k == "node" || k == "vmid" || k == "delete" || k == "digest" {
			continue
		}
		if _, old := f.options[k]; !old {
			f.optionKeys = append(f.optionKeys, k)
		}
		f.options[k] = c.p.str(k)
	}
	return nil, nil
}

// fwRulesOf is where the rules of a call are; mu is held.
func (c *call) fwRulesOf() (*[]fwRule, *Error) {
	f, err := c.fwFileOf()
	if err != nil {
		return nil, err
	}
	if !c.p.has("group") {
		return &f.rules, nil
	}
	for _, g := range f.groups {
		if g.name == c.p.str("group") {
			return &g.rules, nil
		}
	}
	return nil, dief("no such security group '%s'", c.p.str("group"))
}

func apiFwRules(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	rules, err := c.fwRulesOf()
	if err != nil {
		return nil, err
	}
	f, err := c.fwFileOf()
	if err != nil {
		return nil, err
	}
	digest := digestOf(f.text())
	out := []map[string]any{}
	for i, r := range *rules {
		e := map[string]any{"pos": i, "digest": digest}
		for k, v := range r {
			e[k] = v
		}
		e["enable"] = atoi(r["enable"])
		if p, err := netip.ParsePrefix(r["dest"] + r["source"]); err == nil {
			e["ipversion"] = 6
			if p.Addr().Is4() {
				e["ipversion"] = 4
			}
		}
		out = append(out, e)
	}
	return out, nil
}

func apiFwAddRule(c *call) (any, *Error) {
	if a := c.p.str("action"); c.p.str("type") != "group" && !slices.Contains(policies, a) {
		return nil, badParam("action", "unknown action '"+a+"'")
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	rules, err := c.fwRulesOf()
	if err != nil {
		return nil, err
	}
	r := fwRule{"enable": "0"}
	for k := range c.p {
		if k != "node" && k != "vmid" && k != "group" && k != "pos" && k != "digest" {
			r[k] = c.p.str(k)
		}
	}
	*rules = append([]fwRule{r}, *rules...)
	return nil, nil
}

func apiFwDeleteRule(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	rules, err := c.fwRulesOf()
	if err != nil {
		return nil, err
	}
	pos := c.p.num("pos")
	if pos < 0 || pos >= len(*rules) {
		return nil, dief("no rule at position %d", pos)
	}
	*rules = slices.Delete(*rules, pos, pos+1)
	return nil, nil
}

func apiFwSets(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f, err := c.fwFileOf()
	if err != nil {
		return nil, err
	}
	out := []map[string]any{}
	for _, s := range f.ipsets {
		out = append(out, map[string]any{"name": s.name, "digest": digestOf(f.text())})
	}
	return out, nil
}

func apiFwAddSet(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f, err := c.fwFileOf()
	if err != nil {
		return nil, err
	}
	name := c.p.str("name")
	for _, s := range f.ipsets {
		if s.name == name {
			return nil, badParam("name", "IPSet '"+name+"' already exists")
		}
	}
	f.ipsets = append(f.ipsets, &fwSet{name: name, comment: c.p.str("comment")})
	return nil, nil
}

func apiFwAddCIDR(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f, err := c.fwFileOf()
	if err != nil {
		return nil, err
	}
	for _, s := range f.ipsets {
		if s.name != c.p.str("name") {
			continue
		}
		cidr := c.p.str("cidr")
		if slices.Contains(s.cidrs, cidr) {
			return nil, badParam("cidr", "address '"+cidr+"' already exists")
		}
		s.cidrs = append(s.cidrs, cidr)
		return nil, nil
	}
	return nil, dief("no such IPSet '%s'", c.p.str("name"))
}

func apiFwGroups(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f := c.n.fwOf("cluster")
	out := []map[string]any{}
	for _, g := range f.groups {
		e := map[string]any{"group": g.name, "digest": digestOf(f.text())}
		if g.comment != "" {
			e["comment"] = g.comment
		}
		out = append(out, e)
	}
	return out, nil
}

func apiFwAddGroup(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f := c.n.fwOf("cluster")
	name := c.p.str("group")
	for _, g := range f.groups {
		if g.name == name {
			return nil, badParam("group", "Security group '"+name+"' already exists")
		}
	}
	f.groups = append(f.groups, &fwGroup{name: name, comment: c.p.str("comment")})
	return nil, nil
}

func apiFwDeleteGroup(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	f := c.n.fwOf("cluster")
	for i, g := range f.groups {
		if g.name != c.p.str("group") {
			continue
		}
		if len(g.rules) > 0 {
			return nil, dief("Security group '%s' is not empty", g.name)
		}
		f.groups = slices.Delete(f.groups, i, i+1)
		return nil, nil
	}
	return nil, nil
}
