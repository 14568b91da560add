package pve

import (
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// UPID identifies a task: UPID:NODE:PID:PSTART:STARTTIME:TYPE:ID:USER: with
// the colon at its end.
type UPID string

// ParseUPID checks that s is a valid UPID.
func ParseUPID(s string) (UPID, error) {
	f := strings.Split(s, ":")
	if len(f) != 9 || f[0] != "UPID" || f[8] != "" || f[1] == "" || f[5] == "" || len(s) > 512 || strings.ContainsAny(s, " \t\r\n/") {
		return "", agentlab.Errorf(agentlab.CodeInternal, "%s is not a task ID", strconv.Quote(agentlab.OneLine(s, 80)))
	}
	for _, hex := range f[2:5] {
		if _, err := strconv.ParseUint(hex, 16, 64); err != nil {
			return "", agentlab.Errorf(agentlab.CodeInternal, "%s is not a task ID", strconv.Quote(agentlab.OneLine(s, 80)))
		}
	}
	return UPID(s), nil
}

func (u UPID) field(i int) string {
	f := strings.Split(string(u), ":")
	if i >= len(f) {
		return ""
	}
	return f[i]
}

// Node returns the node of the task.
func (u UPID) Node() string { return u.field(1) }

// Type returns the type of the task, e.g. "qmclone".
func (u UPID) Type() string { return u.field(5) }

// ID returns the object of the task: for a VM its number (for a clone, that of
// the source), otherwise another text.
func (u UPID) ID() string { return u.field(6) }
