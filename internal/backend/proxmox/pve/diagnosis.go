package pve

import (
	"strings"

	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// agentError is the prefix of messages of a guest through its agent: the guest
// chooses the rest, so it is not evidence about the node.
const agentError = "Agent error: "

var (
	// perlNoise matches Perl's own warnings among the messages, which
	// Proxmox VE 9 prints in every call.
	perlNoise = lazyre.New(`^(for my \(\.\.\.\)|Use of uninitialized|Wide character|.* is experimental|.* is deprecated|Subroutine .* redefined).* at /\S+ line \d+\.?$`)
	usageLine = lazyre.New(`^(pvesh|qm|pvesm) \S+ .*<`)
	paramLine = lazyre.New(`^([a-z][A-Za-z0-9_-]*): (.*)$`)
)

// parseDiagnosis returns the fault in a program's standard error: the last
// meaningful line or, for rejected parameters ("400 Parameter verification
// failed."), each parameter with its reason. It returns nil if there is none.
func parseDiagnosis(diag string) *Fault {
	var lines []string
	noise := ""
	for l := range strings.Lines(diag) {
		l = strings.TrimSpace(l)
		switch {
		case l == "" || l == "OK" || l == "trying to acquire lock...":
		case perlNoise.MatchString(l) || strings.HasPrefix(l, "proxy handler failed"):
			noise = l // with pvesh of another node the lines before have the fault
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
		if strings.HasPrefix(l, agentError) { // the lines after it may be from the guest
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

// refusedParams parses the lines "parameter: reason". A reason may continue on
// the next line, and the usage follows the last.
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
