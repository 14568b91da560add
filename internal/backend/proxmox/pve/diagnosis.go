package pve

import (
	"regexp"
	"strings"
)

// agentError begins what a guest has said through its agent: whatever follows
// is the guest's choice, and proves nothing of the node.
const agentError = "Agent error: "

var (
	// perlNoise is what Perl itself has to say, which stands among the
	// messages, with 9 in every call.
	perlNoise = regexp.MustCompile(`^(for my \(\.\.\.\)|Use of uninitialized|Wide character|.* is experimental|.* is deprecated|Subroutine .* redefined).* at /\S+ line \d+\.?$`)
	usageLine = regexp.MustCompile(`^(pvesh|qm|pvesm) \S+ .*<`)
	paramLine = regexp.MustCompile(`^([a-z][A-Za-z0-9_-]*): (.*)$`)
)

// parseDiagnosis reads the fault from what a program has printed to standard
// error: the last line that says something, or, of parameters that are refused
// ("400 Parameter verification failed."), each with its reason. nil: it said
// nothing.
func parseDiagnosis(diag string) *Fault {
	var lines []string
	noise := ""
	for l := range strings.Lines(diag) {
		l = strings.TrimSpace(l)
		switch {
		case l == "" || l == "OK" || l == "trying to acquire lock...":
		case perlNoise.MatchString(l) || strings.HasPrefix(l, "proxy handler failed"):
			noise = l // of another node's pvesh the lines before tell the fault
		default:
			lines = append(lines, l)
		}
	}
	if len(lines) == 0 {
		if noise == "" {
			return nil
		}
		return &Fault{Message: noise}
	}
	for _, l := range lines {
		if strings.HasPrefix(l, agentError) { // the lines after it may be the guest's own
			return &Fault{Message: l}
		}
	}
	for i, l := range lines {
		if l == "400 Parameter verification failed." {
			return refusedParams(lines[i+1:])
		}
	}
	for len(lines) > 1 && usageLine.MatchString(lines[len(lines)-1]) {
		lines = lines[:len(lines)-1]
	}
	return &Fault{Message: lines[len(lines)-1]}
}

// refusedParams reads the lines "parameter: reason"; a reason may go on in the
// next line, and the usage follows the last.
func refusedParams(lines []string) *Fault {
	f := &Fault{Message: "Parameter verification failed.", Params: map[string]string{}}
	last := ""
	for _, l := range lines {
		if usageLine.MatchString(l) {
			break
		}
		if m := paramLine.FindStringSubmatch(l); m != nil {
			last = m[1]
			f.Params[last] = m[2]
		} else if last != "" {
			f.Params[last] += " " + l
		}
	}
	if len(f.Params) == 0 {
		f.Params = nil
	}
	return f
}
