package pve

import (
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// UPID names a task: UPID:NODE:PID:PSTART:STARTTIME:TYPE:ID:USER: with the
// colon at its end.
type UPID string

// ParseUPID checks that s names a task.
func ParseUPID(s string) (UPID, error) {
	f := strings.Split(s, ":")
	if len(f) != 9 || f[0] != "UPID" || f[8] != "" || f[1] == "" || f[5] == "" || len(s) > 512 || strings.ContainsAny(s, " \t\r\n/") {
		return "", agentlab.Errorf(agentlab.CodeInternal, "%s is not the name of a task", strconv.Quote(agentlab.OneLine(s, 80)))
	}
	for _, hex := range f[2:5] {
		if _, err := strconv.ParseUint(hex, 16, 64); err != nil {
			return "", agentlab.Errorf(agentlab.CodeInternal, "%s is not the name of a task", strconv.Quote(agentlab.OneLine(s, 80)))
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

// Node is the node that the task runs on.
func (u UPID) Node() string { return u.field(1) }

// Type is the kind of task, e.g. "qmclone".
func (u UPID) Type() string { return u.field(5) }

// ID is what the task works on: of a VM its number (of a clone, the source's),
// else another text.
func (u UPID) ID() string { return u.field(6) }

// User is who began it: "root@pam" or "user@realm!token".
func (u UPID) User() string { return u.field(7) }
