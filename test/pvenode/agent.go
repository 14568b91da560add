package pvenode

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"time"
)

// agentCommands are the commands without parameters, with their method and
// the privilege of version 9; version 8 wants VM.Monitor for all of them.
var agentCommands = []struct{ name, method, priv string }{
	{"ping", "POST", "VM.GuestAgent.Audit"}, {"get-time", "GET", "VM.GuestAgent.Audit"}, {"info", "GET", "VM.GuestAgent.Audit"},
	{"fsfreeze-status", "POST", "VM.GuestAgent.FileSystemMgmt"}, {"fsfreeze-freeze", "POST", "VM.GuestAgent.FileSystemMgmt"},
	{"fsfreeze-thaw", "POST", "VM.GuestAgent.FileSystemMgmt"}, {"fstrim", "POST", "VM.GuestAgent.FileSystemMgmt"},
	{"network-get-interfaces", "GET", "VM.GuestAgent.Audit"}, {"get-vcpus", "GET", "VM.GuestAgent.Audit"}, {"get-fsinfo", "GET", "VM.GuestAgent.Audit"},
	{"get-memory-blocks", "GET", "VM.GuestAgent.Audit"}, {"get-memory-block-info", "GET", "VM.GuestAgent.Audit"},
	{"suspend-hybrid", "POST", "VM.PowerMgmt"}, {"suspend-ram", "POST", "VM.PowerMgmt"}, {"suspend-disk", "POST", "VM.PowerMgmt"}, {"shutdown", "POST", "VM.PowerMgmt"},
	{"get-host-name", "GET", "VM.GuestAgent.Audit"}, {"get-osinfo", "GET", "VM.GuestAgent.Audit"}, {"get-users", "GET", "VM.GuestAgent.Audit"}, {"get-timezone", "GET", "VM.GuestAgent.Audit"},
}

// agentPerm is the privilege of a command, by version.
func agentPerm(privs9 ...string) func(c *call) *Error {
	return func(c *call) *Error {
		path := "/vms/" + c.p.str("vmid")
		if !c.n.v9() {
			return c.need(path, "VM.Monitor")
		}
		return c.needAny(path, append(privs9, "VM.GuestAgent.Unrestricted")...)
	}
}

// agentCalls are the guest agent's calls.
func agentCalls() []endpoint {
	const base = "/nodes/{node}/qemu/{vmid}/agent"
	var names []string
	var out []endpoint
	for _, a := range agentCommands {
		names = append(names, a.name)
		perm := agentPerm(a.priv)
		if a.name == "fsfreeze-status" {
			perm = agentPerm("VM.GuestAgent.Audit", "VM.GuestAgent.FileSystemMgmt")
		}
		out = append(out, endpoint{method: a.method, path: base + "/" + a.name, perm: perm, run: agentSimple(a.name)})
	}
	return append(out,
		endpoint{method: "POST", path: base, perm: agentPerm(), params: []param{str("command").must().of(names...)},
			run: func(c *call) (any, *Error) { return agentSimple(c.p.str("command"))(c) }},
		endpoint{method: "POST", path: base + "/exec", perm: agentPerm(), run: apiAgentExec, params: []param{str("command").must(), str("input-data").upTo(64 << 10)}},
		endpoint{method: "GET", path: base + "/exec-status", perm: agentPerm(), run: apiAgentExecStatus, params: []param{integer("pid").must()}},
		endpoint{method: "GET", path: base + "/file-read", perm: agentPerm("VM.GuestAgent.FileRead"), run: apiAgentFileRead, params: []param{str("file").must()}},
		endpoint{method: "POST", path: base + "/file-write", perm: agentPerm("VM.GuestAgent.FileWrite"), run: apiAgentFileWrite,
			params: []param{str("file").must(), str("content").must().upTo(60 << 10), boolean("encode")}},
		endpoint{method: "POST", path: base + "/set-user-password", perm: agentPerm(), run: apiAgentPassword,
			params: []param{str("username").must(), {name: "password", need: true, minLen: 5, maxLen: 1024}, boolean("crypted")}},
	)
}

// agentGuest finds the guest whose agent answers; the errors come in this
// order, the last one after its wait.
func (c *call) agentGuest() (Guest, *Error) {
	v, err := c.load(c.p.num("vmid"))
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	_, configured := v.conf["agent"]
	configured = configured && (!c.n.v9() || agentEnabled(v.conf))
	run := v.run
	c.n.mu.Unlock()
	switch {
	case !configured:
		return nil, dief("No QEMU guest agent configured")
	case run == nil:
		return nil, dief("VM %d is not running", v.id)
	}
	began := time.Now()
	if _, err := run.guest.Agent(c.ctx, "guest-ping", nil); err != nil {
		c.pause(c.n.cfg.Waits.Agent - time.Since(began))
		return nil, dief("QEMU guest agent is not running")
	}
	return run.guest, nil
}

// qga sends a command; what the agent refuses comes as its own words.
func (c *call) qga(g Guest, command string, args map[string]any) (any, *Error) {
	raw, err := g.Agent(c.ctx, command, args)
	var refused *AgentError
	switch {
	case errors.As(err, &refused):
		if !latin1(refused.Desc) && !c.cli { // the worker of the daemon dies of it
			return nil, &Error{Status: 596, Message: "Broken pipe"}
		}
		return nil, dief("Agent error: %s", refused.Desc).exit(29)
	case err != nil:
		return nil, dief("VM %d qmp command '%s' failed - got timeout", c.p.num("vmid"), command)
	}
	var out any
	if json.Unmarshal(raw, &out) != nil {
		return nil, dief("malformed answer of the guest agent")
	}
	return out, nil
}

func latin1(s string) bool {
	for _, r := range s {
		if r > 0xff {
			return false
		}
	}
	return true
}

// latin1Bytes are the bytes that a text has there: one of each character.
func latin1Bytes(s string) []byte {
	var out []byte
	for _, r := range s {
		out = append(out, byte(r))
	}
	return out
}

func agentSimple(name string) func(c *call) (any, *Error) {
	return func(c *call) (any, *Error) {
		g, err := c.agentGuest()
		if err != nil {
			return nil, err
		}
		out, err := c.qga(g, "guest-"+name, nil)
		if err != nil {
			if err.Status != 596 && err.Exit == 29 { // these hand the error on as a result
				return map[string]any{"result": map[string]any{"error": map[string]any{"class": "GenericError", "desc": err.Message[len("Agent error: "):]}}}, nil
			}
			return nil, err
		}
		return map[string]any{"result": out}, nil
	}
}

func apiAgentExec(c *call) (any, *Error) {
	g, err := c.agentGuest()
	if err != nil {
		return nil, err
	}
	command := c.p["command"]
	args := map[string]any{"capture-output": true, "path": command[0], "arg": command[1:]}
	if c.p.has("input-data") {
		args["input-data"] = base64.StdEncoding.EncodeToString([]byte(c.p.str("input-data")))
	}
	out, err := c.qga(g, "guest-exec", args)
	if err != nil {
		return nil, err
	}
	return out, nil
}

func apiAgentExecStatus(c *call) (any, *Error) {
	g, err := c.agentGuest()
	if err != nil {
		return nil, err
	}
	out, err := c.qga(g, "guest-exec-status", map[string]any{"pid": c.p.num("pid")})
	if err != nil {
		return nil, err
	}
	m, _ := out.(map[string]any)
	for k, val := range m {
		switch t := val.(type) {
		case bool:
			m[k] = 0
			if t {
				m[k] = 1
			}
		case string:
			if b, e := base64.StdEncoding.DecodeString(t); e == nil {
				m[k] = string(b)
			}
		}
	}
	return m, nil
}

// apiAgentFileRead reads 1 MiB at a time, 16 MiB at most.
func apiAgentFileRead(c *call) (any, *Error) {
	g, err := c.agentGuest()
	if err != nil {
		return nil, err
	}
	handle, err := c.qga(g, "guest-file-open", map[string]any{"path": c.p.str("file")})
	if err != nil {
		return nil, err
	}
	var content []byte
	eof := false
	for len(content) < 16<<20 && !eof {
		out, err := c.qga(g, "guest-file-read", map[string]any{"handle": handle, "count": 1 << 20})
		if err != nil {
			return nil, err
		}
		m, _ := out.(map[string]any)
		text, _ := m["buf-b64"].(string)
		b, _ := base64.StdEncoding.DecodeString(text)
		content = append(content, b...)
		eof, _ = m["eof"].(bool)
		if len(b) == 0 {
			break
		}
	}
	_, _ = c.qga(g, "guest-file-close", map[string]any{"handle": handle})
	res := map[string]any{"content": string(content), "bytes-read": len(content)}
	if !eof {
		res["truncated"] = 1
	}
	return res, nil
}

func apiAgentFileWrite(c *call) (any, *Error) {
	g, err := c.agentGuest()
	if err != nil {
		return nil, err
	}
	buf := c.p.str("content")
	if !c.p.has("encode") || c.p.yes("encode") {
		if !latin1(buf) {
			return nil, dief("Wide character in subroutine entry at /usr/share/perl5/PVE/API2/Qemu/Agent.pm line 486.")
		}
		buf = base64.StdEncoding.EncodeToString(latin1Bytes(buf))
	}
	handle, err := c.qga(g, "guest-file-open", map[string]any{"path": c.p.str("file"), "mode": "wb"})
	if err != nil {
		return nil, err
	}
	if _, err := c.qga(g, "guest-file-write", map[string]any{"handle": handle, "buf-b64": buf}); err != nil {
		return nil, err
	}
	_, err = c.qga(g, "guest-file-close", map[string]any{"handle": handle})
	return nil, err
}

func apiAgentPassword(c *call) (any, *Error) {
	g, err := c.agentGuest()
	if err != nil {
		return nil, err
	}
	out, err := c.qga(g, "guest-set-user-password", map[string]any{
		"username": c.p.str("username"), "password": base64.StdEncoding.EncodeToString([]byte(c.p.str("password"))), "crypted": c.p.yes("crypted"),
	})
	if err != nil {
		return nil, err
	}
	return map[string]any{"result": out}, nil
}
