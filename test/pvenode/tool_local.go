package pvenode

import (
	"strings"
	"time"
)

// The commands that are no call of the API.

const vmConfig = "/nodes/{node}/qemu/{vmid}"

func qmStatus(t *tool, p values) int {
	resp := t.invoke("GET", vmConfig+"/status/current", values{"vmid": p["vmid"]})
	if resp.Err != nil {
		return t.fail(resp.Err, "qm status <vmid> [OPTIONS]")
	}
	s := record(resp.Data)
	if !p.yes("verbose") {
		t.printf("status: %s\n", text(s["qmpstatus"]))
		return 0
	}
	for _, k := range sortedKeys(s) {
		if _, object := s[k].(map[string]any); !object && k != "cpu" && s[k] != nil {
			t.printf("%s: %s\n", k, text(s[k]))
		}
	}
	return 0
}

// volume splits the id of a volume that a command of pvesm names.
func (t *tool) volume(p values) (store, volume string, err *Error) {
	volume = p.str("volume")
	store = p.str("storage")
	if before, _, ok := strings.Cut(volume, ":"); ok {
		return before, volume, nil
	}
	if store == "" {
		return "", "", dief("unable to parse volume ID '%s'", volume)
	}
	return store, volume, nil
}

func pvesmFree(t *tool, p values) int {
	store, volume, err := t.volume(p)
	if err != nil {
		return t.fail(err, "")
	}
	q := values{"storage": {store}, "volume": {volume}}
	if p.has("delay") {
		q["delay"] = p["delay"]
	}
	resp := t.invoke("DELETE", "/nodes/{node}/storage/{storage}/content/{volume}", q)
	if resp.Err != nil && resp.Task == "" && strings.Contains(resp.Err.Message, "still in use by linked clones") {
		// It is found out before the worker begins, and yet exits with 0.
		t.errorf("%s\n", resp.Err.Message)
		return 0
	}
	if resp.Err != nil {
		return t.fail(resp.Err, "")
	}
	return 0
}

// pvesmPath only computes: it does not look whether the volume is there.
func pvesmPath(t *tool, p values) int {
	t.n.mu.Lock()
	s, r, err := t.n.parseVolid(p.str("volume"))
	t.n.mu.Unlock()
	if err != nil {
		return t.fail(err, "pvesm path <volume>")
	}
	t.printf("%s\n", s.filePath(r))
	return 0
}

// qmGuestExec runs a program in the guest and waits for it; the exit code of
// the program does not become that of the command.
func qmGuestExec(t *tool, p values) int {
	const usage = "qm guest exec <vmid> [<extra-args>] [OPTIONS]"
	sync := !p.has("synchronous") || p.yes("synchronous")
	if p.has("timeout") && !sync {
		return t.fail(badParam("synchronous", "needs to be set for 'timeout'"), usage)
	}
	timeout := 30
	if p.has("timeout") {
		timeout = p.num("timeout")
	}
	resp := t.invoke("POST", vmConfig+"/agent/exec", values{"vmid": p["vmid"], "command": p["extra-args"]})
	if resp.Err != nil {
		return t.fail(resp.Err, usage)
	}
	pid := text(record(resp.Data)["pid"])
	result := resp.Data
	exited := false
	for i := 0; sync && (timeout == 0 || i < timeout); i++ {
		st := t.invoke("GET", vmConfig+"/agent/exec-status", values{"vmid": p["vmid"], "pid": {pid}})
		if st.Err != nil {
			return t.fail(st.Err, usage)
		}
		if numeric(record(st.Data)["exited"]) > 0 {
			result, exited = st.Data, true
			break
		}
		t.sleep(t.n.cfg.Waits.Second)
	}
	if sync && !exited {
		t.errorf("timeout reached, returning pid\n")
	}
	t.printAgentResult(map[string]any{"result": decoded(result)})
	return 0
}

func (t *tool) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.ctx.Done():
	}
}
