package nft

import (
	"context"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
)

// Status is what the kernel has of us.
type Status struct {
	Tables []string // families that are loaded; all three, or none, when all is well
	// Drift names what is not as it was rendered: tables, chains and sets
	// that are missing, strange or changed.
	Drift     []string
	Ports     []string // of the bridge
	Sandboxes int      // let in by this process
}

// Applied tells whether all tables are loaded.
func (s Status) Applied() bool { return len(s.Tables) == len(ours) }

// ours are the families of our tables.
var ours = []string{"inet", "bridge", "arp"}

// Status reads back what is loaded and compares it with what should be. A
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
	if s.Tables, err = m.kernel.tables(ctx); err != nil {
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

// Verify reads back what is loaded and tells, with code unavailable, how it
// differs from what should be in force for the sandboxes that were let in.
func (m *Manager) Verify(ctx context.Context) error {
	s, err := m.Status(ctx)
	switch {
	case err != nil:
		return err
	case !s.Applied():
		return agentlab.Errorf(agentlab.CodeUnavailable, "the rules of sandboxes' network are not loaded").
			WithHint("agentlab host network apply")
	case len(s.Drift) > 0:
		return agentlab.Errorf(agentlab.CodeUnavailable, "the rules of sandboxes' network are not as they should be: %s", strings.Join(s.Drift, "; ")).
			WithHint("agentlab host network apply, and find out which program changes them")
	}
	return nil
}

// drift loads what should be there into a network namespace that holds
// nothing else, and compares the kernel's own words of both. A process that
// let no sandbox in does not judge what is there for sandboxes.
func (m *Manager) drift(ctx context.Context) ([]string, error) {
	state := m.state()
	state.Learned = nil // it changes by itself, and is not compared
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

// inScratch loads text where it does nothing and returns how the kernel lists
// it.
func (k kernel) inScratch(ctx context.Context, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	script := `"$0" -f - && for f in ` + strings.Join(ours, " ") + `; do "$0" -s list table $f ` + tableName + ` || exit 1; done`
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script, k.program) //nolint:gosec // found by us
	cmd.Stdin = strings.NewReader(text)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.Output()
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the rules could not be loaded into a namespace of their own to compare them: %w", err).
			WithHint("run it as root")
	}
	return string(out), nil
}

var (
	tableLine = regexp.MustCompile(`^table (\w+) agentlab \{$`)
	blockLine = regexp.MustCompile(`^\t(set|map|chain) (\S+) \{$`)
	elemsText = regexp.MustCompile(`(?s)elements = \{(.*?)\}`)
	// ofPolicy are chains and sets that come and go with sandboxes.
	ofPolicy = regexp.MustCompile(`^(p|yes|r|s|f)_[0-9a-f]{32}`)
	// changing are sets whose elements change by themselves.
	changing = regexp.MustCompile(`^(named|namedranges|learned|ranges|hostflows|served|dhcprate|ndprate|[fs]_)`)
	// ofSandboxes are sets whose elements are the sandboxes.
	ofSandboxes = regexp.MustCompile(`^(bound|dhcp$|policy|redirect|shape|live|ports|senders|macs|arps)`)
)

// blocks takes a listing apart: each chain and set by its name, with elements
// in order, since the kernel lists them in none.
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
		// What sandboxes have in sets may be much, and is not compared.
		if skip = skip || strings.HasPrefix(line, "\t\telements = ") && changing.MatchString(lastWord(name)); skip {
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
		short := lastWord(key)
		if !sandboxes && ofPolicy.MatchString(short) {
			delete(out, key)
			continue
		}
		drop := changing.MatchString(short) || !sandboxes && ofSandboxes.MatchString(short)
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

func lastWord(key string) string { return key[strings.LastIndexByte(key, ' ')+1:] }

// portsSet is the set of the bridge's ports. One that was unplugged stays in it
// until the rules are loaded again, and does no harm.
const portsSet = "bridge set ports"

// within tells whether each line of a block is in another one.
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
			out = append(out, k+" is not ours")
		}
	}
	return out
}

// Check asks the kernel whether it would take the rules, and changes nothing.
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

// Render is the text that Apply would load.
func (m *Manager) Render() (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.render()
}

func (m *Manager) render() (string, error) { return m.renderState(m.state()) }

func (m *Manager) renderState(state State) (string, error) {
	around, err := m.look(m.opts.Config)
	if err != nil {
		return "", err
	}
	state.Ports = around.ports
	around.put(&state.Config)
	return Render(state)
}
