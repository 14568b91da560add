package nft

import (
	"context"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Status is the state of AgentLab's rules in the kernel.
type Status struct {
	Tables []string // loaded families; normally all three or none
	// Drift lists differences from the rendered rules: tables, chains and
	// sets that are missing, unknown or changed.
	Drift     []string
	Ports     []string // of the bridge
	Sandboxes int      // added by this process
}

// Applied reports whether all tables are loaded.
func (s Status) Applied() bool { return len(s.Tables) == len(ours) }

// ours lists the families of AgentLab's tables.
var ours = []string{"inet", "bridge", "arp"}

// Status reads the loaded rules and compares them with the desired ones. A
// process that has not applied the rules itself first asks for the network's
// NAT64 prefixes, which are part of them.
func (m *Manager) Status(ctx context.Context) (Status, error) {
	if m.nat64.Load() == nil {
		m.learnTranslators(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.status(ctx)
}

func (m *Manager) status(ctx context.Context) (Status, error) {
	var s Status
	var err error
	if s.Tables, err = m.kernel.tables(); err != nil {
		return Status{}, err
	}
	s.Sandboxes = len(m.members)
	if s.Ports, err = bridgePorts(m.opts.Config.Bridge); err != nil {
		return Status{}, err
	}
	if !s.Applied() {
		return s, nil
	}
	s.Drift, err = m.drift(ctx)
	return s, err
}

// Verify reads the loaded rules. It returns an error with code unavailable if
// they differ from the desired rules for the added sandboxes.
func (m *Manager) Verify(ctx context.Context) error {
	s, err := m.Status(ctx)
	switch {
	case err != nil:
		return err
	case !s.Applied():
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox network rules are not loaded").
			WithHint("agentlab host network apply")
	case len(s.Drift) > 0:
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox network rules were changed: %s", strings.Join(s.Drift, "; ")).
			WithHint("agentlab host network apply, and find out which program changes them")
	}
	return nil
}

// drift loads the desired rules into an empty network namespace and compares
// the kernel's listings of both. A process that has added no sandbox does not
// compare the parts for sandboxes.
func (m *Manager) drift(ctx context.Context) ([]string, error) {
	state := m.state()
	state.Learned = nil // it changes by itself and is not compared
	text, err := m.renderState(state)
	if err != nil {
		return nil, err
	}
	want, err := m.kernel.inScratch(ctx, text)
	if err != nil {
		return nil, err
	}
	var have strings.Builder
	for _, f := range ours {
		out, err := m.kernel.list(ctx, f)
		if err != nil {
			return nil, err
		}
		have.WriteString(out)
	}
	return differences(blocks(want, len(m.members) > 0), blocks(have.String(), len(m.members) > 0)), nil
}

var (
	tableLine = regexp.MustCompile(`^table (\w+) agentlab \{$`)
	blockLine = regexp.MustCompile(`^\t(set|map|chain) (\S+) \{$`)
	elemsText = regexp.MustCompile(`(?s)elements = \{(.*?)\}`)
	// policyObjects matches chains and sets that are added and removed with
	// sandboxes.
	policyObjects = regexp.MustCompile(`^(p|yes|r|s|f)_[0-9a-f]{32}`)
	// dynamicSets matches sets whose elements change by themselves.
	dynamicSets = regexp.MustCompile(`^(named|namedranges|learned|ranges|hostflows|served|dhcprate|ndprate|[fs]_)`)
	// sandboxSets matches sets whose elements are the sandboxes.
	sandboxSets = regexp.MustCompile(`^(bound|dhcp$|policy|redirect|shape|live|ports|senders|macs|arps)`)
)

// blocks splits a listing into chains and sets by name. It sorts elements,
// because the kernel lists them in no fixed order.
func blocks(list string, sandboxes bool) map[string]string {
	out, text := map[string]string{}, map[string]*strings.Builder{}
	family, name, skip := "", "", false
	for line := range strings.Lines(list) {
		line = strings.TrimRight(line, "\n")
		if t := tableLine.FindStringSubmatch(line); t != nil {
			family, name = t[1], ""
			text["table "+family] = &strings.Builder{}
			continue
		}
		if b := blockLine.FindStringSubmatch(line); b != nil {
			name = family + " " + b[1] + " " + b[2]
			text[name] = &strings.Builder{}
			skip = false
			continue
		}
		// Elements of sandboxes can be many and are not compared.
		if skip = skip || strings.HasPrefix(line, "\t\telements = ") && dynamicSets.MatchString(afterLastSpace(name)); skip {
			skip = !strings.HasSuffix(line, "}")
			continue
		}
		if name != "" && strings.Trim(line, "\t }") != "" {
			text[name].WriteString(line + "\n")
		}
	}
	for key, b := range text {
		out[key] = b.String()
	}
	for key, text := range out {
		short := afterLastSpace(key)
		if !sandboxes && policyObjects.MatchString(short) {
			delete(out, key)
			continue
		}
		drop := dynamicSets.MatchString(short) || !sandboxes && sandboxSets.MatchString(short)
		out[key] = elemsText.ReplaceAllStringFunc(text, func(e string) string {
			if drop {
				return ""
			}
			list := strings.Split(strings.Trim(strings.TrimPrefix(e, "elements = "), "{}"), ",")
			for i := range list {
				list[i] = strings.TrimSpace(list[i])
			}
			slices.Sort(list)
			return strings.Join(list, "\n")
		})
		if drop {
			out[key] = strings.TrimSpace(out[key])
		}
	}
	return out
}

func afterLastSpace(key string) string { return key[strings.LastIndexByte(key, ' ')+1:] }

// portsSet is the set of the bridge's ports. A removed port stays in it until
// the rules are loaded again, which does no harm.
const portsSet = "bridge set ports"

// within reports whether each line of a block is in another one.
func within(some, all string) bool {
	lines := slices.Collect(strings.Lines(all + "\n"))
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	for line := range strings.Lines(some) {
		if !slices.Contains(lines, strings.TrimSpace(line)) {
			return false
		}
	}
	return true
}

func differences(want, have map[string]string) []string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if got, ok := have[k]; !ok {
			out = append(out, k+" is missing")
		} else if strings.TrimSpace(got) != strings.TrimSpace(want[k]) && (k != portsSet || !within(want[k], got)) {
			out = append(out, k+" is changed")
		}
	}
	for _, k := range slices.Sorted(maps.Keys(have)) {
		if _, ok := want[k]; !ok {
			out = append(out, k+" is not AgentLab's")
		}
	}
	return out
}

// Check checks whether the kernel would accept the rules, and changes nothing.
func (m *Manager) Check(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	text, err := m.render()
	if err != nil {
		return err
	}
	_, err = m.kernel.run(ctx, text, "-c", "-f", "-")
	return err
}

// Render returns the text that Apply would load.
func (m *Manager) Render() (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.render()
}

func (m *Manager) render() (string, error) { return m.renderState(m.state()) }

func (m *Manager) renderState(state State) (string, error) {
	around, err := m.readHostState(m.opts.Config)
	if err != nil {
		return "", err
	}
	state.Ports = around.ports
	around.applyTo(&state.Config)
	return Render(state)
}
