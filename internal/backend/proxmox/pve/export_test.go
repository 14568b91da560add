package pve

import (
	"context"
	"net/url"
	"strconv"

	"github.com/agentlab-vm/agentlab"
)

// Calls that tests alone make, to show what is strange about them.

// SetTask changes a configuration in a task (POST).
func (c *Client) SetTask(ctx context.Context, node string, vmid int, ch Changes) (UPID, error) {
	return c.vmTask(ctx, "configure", Post, node, vmid, "config", ch.params())
}

// AgentPing asks whether the guest agent answers. Error unavailable: it does
// not, which takes 3 s to find out; conflict: the VM does not run.
func (c *Client) AgentPing(ctx context.Context, node string, vmid int) error {
	return c.vmCall(ctx, "ping the guest agent of", Post, node, vmid, "agent/ping", nil, nil)
}

// AgentExec starts a program in the guest and returns its process id there.
// argv is a list: Proxmox takes one string with blanks as one name. Error
// unknown_outcome may mean that there is no such program: the call that starts
// a missing program answers 596.
func (c *Client) AgentExec(ctx context.Context, node string, vmid int, argv []string, input []byte) (int, error) {
	if len(argv) == 0 || len(input) > 64<<10 {
		return 0, agentlab.Errorf(agentlab.CodeInvalid, "the guest agent takes a command and at most 64 KiB of input")
	}
	p := url.Values{"command": argv}
	if len(input) > 0 {
		p.Set("input-data", string(input))
	}
	var out struct {
		PID Int `json:"pid"`
	}
	err := c.vmCall(ctx, "run a program through the guest agent of", Post, node, vmid, "agent/exec", p, &out)
	return int(out.PID), err
}

// ExecResult is what a program in the guest has come to.
type ExecResult struct {
	Exited   Bool `json:"exited"`
	ExitCode Int  `json:"exitcode"`
	Signal   Int  `json:"signal"`
	Out      Str  `json:"out-data"`
	Err      Str  `json:"err-data"`
}

// AgentExecStatus asks about a program. That it has exited can be read once.
func (c *Client) AgentExecStatus(ctx context.Context, node string, vmid, pid int) (ExecResult, error) {
	var out ExecResult
	err := c.vmCall(ctx, "ask the guest agent about a program of", Get, node, vmid, "agent/exec-status", url.Values{"pid": {strconv.Itoa(pid)}}, &out)
	return out, err
}
