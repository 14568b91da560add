package pve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// scripted is a Transport that answers as a test says.
type scripted struct {
	answer func(n int, m Method, path string, p url.Values) (string, error)
	calls  []string
}

func (s *scripted) Call(_ context.Context, m Method, path string, p url.Values) (json.RawMessage, error) {
	s.calls = append(s.calls, string(m)+" "+path+" "+p.Encode())
	a, err := s.answer(len(s.calls)-1, m, path, p)
	return json.RawMessage(a), err
}
func (s *scripted) Calls() int64 { return int64(len(s.calls)) }
func (s *scripted) Root() Root   { return nil }

func (s *scripted) Ended(UPID) ([]string, bool) { return nil, false }

func (s *scripted) Close() error { return nil }

const cloneTask UPID = "UPID:pve:00001FD8:0003D7EE:6B00F8DB:qmclone:9000:agentlab@pve!ctl:"

func statusAnswer(status, exit string) string {
	b, _ := json.Marshal(map[string]any{"status": status, "exitstatus": exit, "pid": 8152, "upid": string(cloneTask)})
	return string(b)
}

func TestWaitPollsLessAndLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var at []time.Duration
		s := &scripted{answer: func(n int, _ Method, path string, _ url.Values) (string, error) {
			at = append(at, time.Since(begin))
			if !strings.HasSuffix(path, "/status") {
				t.Errorf("call %s", path)
			}
			if n < 7 {
				return statusAnswer("running", ""), nil
			}
			return statusAnswer("stopped", "OK"), nil
		}}
		if _, err := New(s).Wait(t.Context(), cloneTask); err != nil {
			t.Fatal(err)
		}
		want := []time.Duration{0, 500 * time.Millisecond, 1500 * time.Millisecond, 3500 * time.Millisecond, 7500 * time.Millisecond, 12500 * time.Millisecond, 17500 * time.Millisecond, 22500 * time.Millisecond}
		if !slices.Equal(at, want) {
			t.Errorf("polled at %v, want %v", at, want)
		}
		if s.calls[0] != "GET /nodes/pve/tasks/UPID:pve:00001FD8:0003D7EE:6B00F8DB:qmclone:9000:agentlab@pve%21ctl:/status " {
			t.Errorf("%q", s.calls[0])
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{answer: func(int, Method, string, url.Values) (string, error) { return statusAnswer("running", ""), nil }}
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		_, err := New(s).Wait(ctx, cloneTask)
		if agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
	})
}

// While the node does not answer the task may well go on: that is neither its
// end nor its failure.
func TestWaitSurvivesUnresponsiveNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{answer: func(n int, _ Method, _ string, _ url.Values) (string, error) {
			if n < 4 {
				return "", agentlab.Errorf(agentlab.CodeUnavailable, "no answer")
			}
			return statusAnswer("stopped", "OK"), nil
		}}
		if _, err := New(s).Wait(t.Context(), cloneTask); err != nil {
			t.Error(err)
		}
		s = &scripted{answer: func(int, Method, string, url.Values) (string, error) {
			return "", agentlab.Errorf(agentlab.CodeUnavailable, "no answer")
		}}
		if _, err := New(s).Wait(t.Context(), cloneTask); agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Error(err)
		}
		s = &scripted{answer: func(int, Method, string, url.Values) (string, error) {
			return "", &Fault{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{"upid": "no such task"}}
		}}
		if _, err := New(s).Wait(t.Context(), cloneTask); agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Error("a task that the node does not know has an end: ", err)
		}
	})
}

// The last line of a task of pvesh is written after the task's end.
func TestWaitPollsUntilEndIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{answer: func(n int, _ Method, _ string, _ url.Values) (string, error) {
			if n == 0 {
				return statusAnswer("stopped", "unexpected status"), nil
			}
			return statusAnswer("stopped", "OK"), nil
		}}
		if _, err := New(s).Wait(t.Context(), cloneTask); err != nil {
			t.Error(err)
		}
		s = &scripted{answer: func(_ int, _ Method, path string, _ url.Values) (string, error) {
			if strings.HasSuffix(path, "/log") {
				return `[{"n":1,"t":"create linked clone of drive scsi0"}]`, nil
			}
			return statusAnswer("stopped", "unexpected status"), nil
		}}
		if _, err := New(s).Wait(t.Context(), cloneTask); agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Error(err)
		}
	})
}

func TestTaskLogsArePaged(t *testing.T) {
	const lines = 1234
	s := &scripted{answer: func(_ int, _ Method, path string, p url.Values) (string, error) {
		if strings.HasSuffix(path, "/status") {
			return statusAnswer("stopped", "zfs error: rpool/data/vm-9999-fork"), nil
		}
		var start, limit int
		_, _ = fmt.Sscan(p.Get("start"), &start)
		_, _ = fmt.Sscan(p.Get("limit"), &limit)
		var out []map[string]any
		for i := start; i < min(start+limit, lines); i++ {
			text := fmt.Sprintf("transferred %d", i)
			if i == lines-99 {
				text = "cannot destroy 'rpool/data/vm-9999-p1': volume has dependent clones"
			}
			out = append(out, map[string]any{"n": i + 1, "t": text})
		}
		b, _ := json.Marshal(out)
		return string(b), nil
	}}
	_, err := New(s).Wait(t.Context(), cloneTask)
	if agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "dependent clones") || strings.Contains(err.Error(), "transferred") {
		t.Errorf("%s: %v", agentlab.CodeOf(err), err)
	}
}

// Answers that make no sense are errors, never an empty list or a state.
func TestInvalidAnswers(t *testing.T) {
	for _, answer := range []string{`"x"`, `{"status":"odd"}`, `[{"vmid":0,"status":"stopped"}]`, `[{"name":"x"}]`, `[{"volid":""}]`, `5`, `{`} {
		c := New(&scripted{answer: func(int, Method, string, url.Values) (string, error) { return answer, nil }})
		if v, err := c.VMs(t.Context(), "pve"); err == nil {
			t.Errorf("VMs of %s: %v", answer, v)
		}
		if v, err := c.Status(t.Context(), "pve", 101); err == nil {
			t.Errorf("Status of %s: %v", answer, v)
		}
		if v, err := c.Config(t.Context(), "pve", 101); err == nil {
			t.Errorf("Config of %s: %v", answer, v)
		}
		if v, err := c.Content(t.Context(), "pve", "local", "", 0); err == nil {
			t.Errorf("Content of %s: %v", answer, v)
		}
		if v, err := c.TaskStatus(t.Context(), cloneTask); err == nil {
			t.Errorf("TaskStatus of %s: %v", answer, v)
		}
		if v, err := c.Start(t.Context(), "pve", 101); agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Errorf("Start of %s: %v %v", answer, v, err)
		}
	}
	// null is no list: an empty one is [].
	c := New(&scripted{answer: func(int, Method, string, url.Values) (string, error) { return "null", nil }})
	if v, err := c.VMs(t.Context(), "pve"); err == nil {
		t.Errorf("VMs of null: %v", v)
	}
	if v, err := c.Content(t.Context(), "pve", "local", "", 0); err == nil {
		t.Errorf("Content of null: %v", v)
	}
}

// Proxmox: a stop may not overrule the shutdown of a highly available VM.
func TestStopOfAHighlyAvailableVM(t *testing.T) {
	s := &scripted{answer: func(n int, _ Method, _ string, _ url.Values) (string, error) {
		if n == 0 {
			return "", &Fault{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{"overrule-shutdown": "Not applicable for HA resources."}}
		}
		return `"` + string(cloneTask) + `"`, nil
	}}
	if _, err := New(s).Stop(t.Context(), "pve", 101); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(s.calls, []string{"POST /nodes/pve/qemu/101/status/stop overrule-shutdown=1", "POST /nodes/pve/qemu/101/status/stop "}) {
		t.Errorf("%q", s.calls)
	}
}

// Before 8.2 a stop cannot overrule a shutdown.
func TestStopWithoutOverruling(t *testing.T) {
	s := &scripted{answer: func(n int, _ Method, _ string, _ url.Values) (string, error) {
		if n == 0 {
			return "", &Fault{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{
				"overrule-shutdown": "property is not defined in schema and the schema does not allow additional properties",
			}}
		}
		return `"UPID:pve:00001FD8:0003D7EE:6B00F8DB:qmstop:101:root@pam:"`, nil
	}}
	if _, err := New(s).Stop(t.Context(), "pve", 101); err != nil {
		t.Error(err)
	}
	if !slices.Equal(s.calls, []string{"POST /nodes/pve/qemu/101/status/stop overrule-shutdown=1", "POST /nodes/pve/qemu/101/status/stop "}) {
		t.Errorf("%q", s.calls)
	}
}

func TestGuestInterfaces(t *testing.T) {
	const recorded = `{"result":[{"ip-addresses":[{"ip-address-type":"ipv4","prefix":8,"ip-address":"127.0.0.1"}],"hardware-address":"00:00:00:00:00:00","name":"lo"},
		{"ip-addresses":[{"ip-address-type":"ipv4","prefix":16,"ip-address":"10.77.0.55"},{"ip-address-type":"ipv6","prefix":64,"ip-address":"fe80::be24:11ff:fe00:2"}],"name":"eth0","hardware-address":"bc:24:11:00:00:02"},
		{"name":"wg0"},{"name":"odd","hardware-address":"zz","ip-addresses":[{"ip-address":"999.1.1.1"},{"ip-address":"fe80::1%eth0"},{}]}]}`
	got, err := decodeInterfaces(json.RawMessage(recorded))
	if err != nil || len(got) != 4 {
		t.Fatal(got, err)
	}
	if got[1].MAC.String() != "bc:24:11:00:00:02" || len(got[1].IPs) != 2 || got[1].IPs[0].String() != "10.77.0.55" {
		t.Errorf("%+v", got[1])
	}
	if got[2].MAC != nil || got[2].IPs != nil || got[3].MAC != nil || got[3].IPs != nil {
		t.Errorf("%+v", got[2:])
	}
}

func TestAgentWritesOnlyASCII(t *testing.T) {
	c := New(&scripted{answer: func(int, Method, string, url.Values) (string, error) { return "null", nil }})
	for _, b := range [][]byte{[]byte("é"), {0}, make([]byte, 61<<10)} {
		if err := c.AgentFileWrite(t.Context(), "pve", 101, "/x", b); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%d bytes: %v", len(b), err)
		}
	}
	if err := c.AgentFileWrite(t.Context(), "pve", 101, "/x", []byte("{}\n")); err != nil {
		t.Error(err)
	}
}

// What a node answers is bounded, and so is what a guest tells through it.
func TestAnswersAreBounded(t *testing.T) {
	w := newWire(t, func(int, *http.Request, string) string {
		return data(`"` + strings.Repeat("x", maxAnswer) + `"`)
	})
	if _, err := w.client().VMs(guard.Context(t), "pve"); err == nil || !strings.Contains(err.Error(), "longer than") {
		t.Errorf("REST: %v", err)
	}
	c := shellClient(t, fmt.Sprintf("head -c %d /dev/zero", maxAnswer+1))
	if _, err := c.VMs(guard.Context(t), "pve"); err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("shell: %v", err)
	}
	ip := `{"ip-address":"10.77.0.5"}`
	one := `{"name":"` + strings.Repeat("n", 1000) + `","ip-addresses":[` + strings.Repeat(ip+",", maxInterfaces) + ip + `]}`
	got, err := decodeInterfaces(json.RawMessage(`{"result":[` + strings.Repeat(one+",", maxInterfaces) + one + `]}`))
	if err != nil || len(got) != maxInterfaces || len(got[0].IPs) != maxInterfaces || len(got[0].Name) > 70 {
		t.Errorf("%d interfaces, %v", len(got), err)
	}
}
