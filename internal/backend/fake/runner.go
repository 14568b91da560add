package fake

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// runnerRecord is the progress of a runner; it is kept as long as the VM.
type runnerRecord struct {
	Boot      guestapi.BootstrapResponse `json:"boot"`
	FetchedAt time.Time                  `json:"fetched_at"`
	Line      int                        `json:"line"` // number of completed lines of the task
	Log       string                     `json:"log,omitempty"`
	Acked     int64                      `json:"acked"` // bytes of Log that the controller has
	Stubborn  bool                       `json:"stubborn,omitempty"`
	Silent    bool                       `json:"silent,omitempty"`
	Final     *guestapi.Report           `json:"final,omitempty"` // the report to send
	Done      bool                       `json:"done,omitempty"`
}

var withoutJob = runnerRecord{Done: true} // of all runners that have no job

// heartbeat is the longest time between two reports.
const heartbeat = 15 * time.Second

var errSilent = errors.New("silent") // ends a runner that sends nothing more

// stopped is the cause of the agent's end: the requested final status and its
// reason.
type stopped struct{ status, reason string }

// Error returns the reason, or the status if there is none.
func (s stopped) Error() string {
	if s.reason != "" {
		return s.reason
	}
	return "asked to stop: " + s.status
}

// runner simulates agent-runner in one guest.
type runner struct {
	g    *guest
	ctx  context.Context
	http *http.Client

	line int // index of the running line of the task

	mu    sync.Mutex
	phase string
}

// startRunner runs the runner until the job is reported or the VM is off.
func (g *guest) startRunner() {
	g.in.h.spawn(func() {
		r := &runner{g: g, ctx: g.ctx, phase: "bootstrap", http: g.httpClient()}
		if err := r.run(); err != nil && g.ctx.Err() == nil && !errors.Is(err, errSilent) {
			g.in.console.line("[fake] runner: " + err.Error())
		}
	})
}

// state returns the stored progress; nil before the bootstrap was fetched.
func (r *runner) state() *runnerRecord {
	mem, _ := r.g.in.memory(r.g)
	if mem.Runner == nil {
		return nil
	}
	c := *mem.Runner
	return &c
}

func (r *runner) change(fn func(*runnerRecord)) {
	r.g.in.update(r.g, func(mem *guestRecord) {
		c := *cmp.Or(mem.Runner, &runnerRecord{}) // readers may use the old one
		fn(&c)
		mem.Runner = &c
	})
}

func (r *runner) run() error {
	st := r.state()
	if st == nil {
		if err := r.bootstrap(); err != nil {
			return err
		}
		st = r.state()
	}
	if st == nil || st.Done || st.Silent {
		return nil
	}
	if st.Final == nil {
		final, err := r.work(st)
		if err != nil {
			return err
		}
		r.change(func(s *runnerRecord) { s.Final = &final })
		if st = r.state(); st == nil {
			return r.ctx.Err()
		}
	}
	if err := r.reportUntilHeard(*st.Final); err != nil {
		return err
	}
	r.change(func(s *runnerRecord) { s.Done = true })
	return nil
}

// bootstrap exchanges the token for the job.
func (r *runner) bootstrap() error {
	mem, _ := r.g.in.memory(r.g)
	if mem.Bootstrap == nil {
		return errSilent
	}
	var boot guestapi.BootstrapResponse
	err := r.retry(func() error {
		return r.call(r.ctx, http.MethodPost, mem.Bootstrap.Controller+guestapi.PathBootstrap, "",
			guestapi.BootstrapRequest{Token: mem.Bootstrap.Token, VMID: mem.Bootstrap.VMID}, &boot)
	})
	if err != nil {
		return err
	}
	rec := &withoutJob
	if boot.Job != nil {
		rec = &runnerRecord{Boot: boot, FetchedAt: r.g.in.h.cfg.Clock()}
	}
	r.g.in.update(r.g, func(mem *guestRecord) { mem.Runner = rec })
	return nil
}

// work runs the task and returns the final report.
func (r *runner) work(st *runnerRecord) (guestapi.Report, error) {
	agent, stop := context.WithCancelCause(r.ctx)
	defer stop(nil)
	if s := st.Boot.Job.Seconds; s > 0 {
		left := time.Duration(s)*time.Second - r.g.in.h.cfg.Clock().Sub(st.FetchedAt)
		t := time.AfterFunc(left, func() { r.direct(guestapi.Directive{Stop: "TIMEOUT"}, stop) })
		defer t.Stop()
	}
	side, endSide := context.WithCancel(r.ctx)
	var wg sync.WaitGroup
	wg.Go(func() { r.beat(side, stop) })
	wg.Go(func() { r.obey(side, stop) })
	defer wg.Wait()
	defer endSide()

	r.enter(stop, "clone")
	if err := r.clone(st.Boot.Job); err != nil {
		return guestapi.Report{Status: "FAILED", Phase: "clone", Message: "clone: " + err.Error()}, nil
	}
	r.enter(stop, workPhase(st.Boot.Job))
	code, err := r.task(agent, st)
	if err != nil {
		return guestapi.Report{}, err
	}
	var judged guestapi.Result
	if st.Boot.Job.Prepare && code == 0 && agent.Err() == nil {
		judged = r.leavePrepared()
	}
	if st.Boot.Job.Judge != "" && code == 0 && agent.Err() == nil {
		r.enter(stop, "judge")
		if judged, err = r.judge(agent, st.Boot.Job); err != nil {
			return guestapi.Report{}, err
		}
	}
	r.enter(stop, "upload")
	if err := r.sendLog("&final=1"); err != nil && r.ctx.Err() != nil {
		return guestapi.Report{}, err
	}
	rep := guestapi.Report{Status: "COMPLETED", Phase: "done", ExitCode: &code, Result: &judged}
	if why := (stopped{}); errors.As(context.Cause(agent), &why) {
		code = 143
		rep.Status, rep.Message = why.status, why.Error()
	} else if code != 0 {
		rep.Status, rep.Message = "FAILED", fmt.Sprintf("the agent exited with code %d", code)
	}
	return rep, nil
}

// task runs the remaining lines of the task.
func (r *runner) task(ctx context.Context, st *runnerRecord) (code int, err error) {
	lines := r.script(st.Boot.Job)
	for i := st.Line; i < len(lines); i++ {
		if ctx.Err() != nil {
			break
		}
		r.line = i
		code, end, err := r.runLine(ctx, strings.TrimSpace(lines[i]))
		if err != nil || end {
			return code, err
		}
		r.change(func(s *runnerRecord) { s.Line = i + 1 })
	}
	return 0, r.ctx.Err()
}

// placeholder becomes the ID of the job in files that are uploaded.
const placeholder = "job-2222222222222"

// runLine runs one line of the task; end reports that the agent ends after it.
func (r *runner) runLine(ctx context.Context, line string) (code int, end bool, err error) {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "", "judge":
	case "echo":
		err = r.log(rest)
	case "exit":
		n, _ := strconv.Atoi(rest)
		return n, true, nil
	case "sleep":
		d, _ := time.ParseDuration(rest)
		_ = sleep(ctx, d)
	case "hang":
		<-ctx.Done()
	case "silent":
		r.change(func(s *runnerRecord) { s.Silent = true })
		return 0, true, errSilent
	case "stubborn":
		r.change(func(s *runnerRecord) { s.Stubborn = true })
	case "crash-vm":
		return 0, true, r.g.in.crash("the guest's kernel panicked")
	case "poweroff":
		return 0, true, r.g.in.cut(backend.PowerStopped, "")
	case "artifact":
		name, text, _ := strings.Cut(rest, " ")
		err = r.upload(name, text)
	case "artifact64":
		name, text, _ := strings.Cut(rest, " ")
		var data []byte
		if data, err = base64.StdEncoding.DecodeString(text); err == nil {
			err = r.upload(name, strings.ReplaceAll(string(data), placeholder, r.state().Boot.Job.ID))
		}
	case "egress":
		if r.g.egress(strings.Fields(rest)) != 0 {
			err = errors.New("egress allow|deny HOST:PORT [RULE] is meant")
		}
	case "env":
		err = r.log(r.state().env(rest))
	case "repo":
		var n int64
		if n, err = r.repo(); err == nil {
			err = r.log(fmt.Sprintf("repository bundle of %d bytes", n))
		}
	case "write":
		r.write(rest)
	case "report":
		err = r.raw(rest)
	default:
		return 127, true, r.log(word + ": not found")
	}
	if r.ctx.Err() != nil {
		return 0, true, r.ctx.Err()
	}
	if err != nil { // an error of the agent, not of the runner
		return 1, true, r.log("error: " + err.Error())
	}
	return 0, false, nil
}

// enter reports a new phase. An error is ignored: the next report has the
// phase too.
func (r *runner) enter(stop context.CancelCauseFunc, phase string) {
	r.mu.Lock()
	r.phase = phase
	r.mu.Unlock()
	r.beatOnce(r.ctx, stop)
}

func (r *runner) beatOnce(ctx context.Context, stop context.CancelCauseFunc) {
	r.mu.Lock()
	rep := guestapi.Report{Status: "RUNNING", Phase: r.phase}
	r.mu.Unlock()
	var d guestapi.Directive
	if r.callController(ctx, guestapi.PathReport, rep, &d) == nil {
		r.direct(d, stop)
	}
}

func (r *runner) beat(ctx context.Context, stop context.CancelCauseFunc) {
	for sleep(ctx, heartbeat) == nil {
		if st := r.state(); st == nil || st.Silent {
			return
		}
		r.beatOnce(ctx, stop)
	}
}

// obey waits for directives.
func (r *runner) obey(ctx context.Context, stop context.CancelCauseFunc) {
	for ctx.Err() == nil {
		st := r.state()
		if st == nil || st.Silent {
			return
		}
		var d guestapi.Directive
		err := r.call(ctx, http.MethodGet, r.controller()+guestapi.PathDirective+"?wait=50", st.Boot.Runner.Token, nil, &d)
		if err != nil {
			_ = sleep(ctx, 500*time.Millisecond)
			continue
		}
		if r.direct(d, stop) {
			return
		}
		if d.Stop != "" {
			_ = sleep(ctx, heartbeat) // it is ignored, and would be returned at once again
		}
	}
}

// direct handles a directive and reports whether it is a stop.
func (r *runner) direct(d guestapi.Directive, stop context.CancelCauseFunc) bool {
	if st := r.state(); d.Stop == "" || st == nil || st.Stubborn || st.Silent {
		return false
	}
	stop(stopped{d.Stop, d.Reason})
	return true
}

// log appends a line to the agent's log and sends the part that the controller
// lacks. The same update marks the task's line as done, so that it is not
// logged again after a crash.
func (r *runner) log(line string) error {
	r.change(func(s *runnerRecord) { s.Log, s.Line = s.Log+line+"\n", r.line+1 })
	return r.sendLog("")
}

// sendLog sends the part of the log that the controller lacks. The controller
// may accept fewer bytes, unless final is set.
func (r *runner) sendLog(final string) error {
	st := r.state()
	if st == nil {
		return r.ctx.Err()
	}
	u := r.controller() + guestapi.PathLog + "?offset=" + strconv.FormatInt(st.Acked, 10) + final
	var ack guestapi.LogAck
	err := r.retry(func() error {
		return r.do(r.ctx, http.MethodPost, u, st.Boot.Runner.Token, strings.NewReader(st.Log[st.Acked:]), &ack)
	})
	if err != nil {
		return err
	}
	r.change(func(s *runnerRecord) { s.Acked = min(max(s.Acked, ack.Size), int64(len(s.Log))) })
	return nil
}

func (r *runner) upload(name, text string) error {
	st := r.state()
	if st == nil || st.Boot.Artifact == nil {
		return errors.New("there is nowhere to upload to")
	}
	var ack guestapi.UploadAck
	u := strings.TrimSuffix(st.Boot.Artifact.Endpoint, "/") + "/" + (&url.URL{Path: name}).EscapedPath()
	return r.retry(func() error {
		return r.do(r.ctx, http.MethodPut, u, st.Boot.Artifact.Token, strings.NewReader(text), &ack)
	})
}

// repo fetches the repository bundle and counts its bytes.
func (r *runner) repo() (int64, error) {
	st := r.state()
	if st == nil {
		return 0, r.ctx.Err()
	}
	var n int64
	err := r.retry(func() (err error) {
		n, err = r.fetch(r.ctx, r.controller()+guestapi.PathRepo, st.Boot.Runner.Token)
		return err
	})
	return n, err
}

// raw sends the task's report unchanged and logs the answer.
func (r *runner) raw(text string) error {
	st := r.state()
	if st == nil {
		return r.ctx.Err()
	}
	err := r.do(r.ctx, http.MethodPost, r.controller()+guestapi.PathReport, st.Boot.Runner.Token, strings.NewReader(text), nil)
	if err != nil {
		return r.log("report: " + err.Error())
	}
	return r.log("report: accepted")
}

func (r *runner) reportUntilHeard(rep guestapi.Report) error {
	return r.retry(func() error { return r.callController(r.ctx, guestapi.PathReport, rep, nil) })
}

func (r *runner) controller() string {
	mem, _ := r.g.in.memory(r.g)
	if mem.Bootstrap == nil {
		return controllerURL
	}
	return mem.Bootstrap.Controller
}

func (r *runner) callController(ctx context.Context, path string, in, out any) error {
	st := r.state()
	if st == nil {
		return errSilent
	}
	return r.call(ctx, http.MethodPost, r.controller()+path, st.Boot.Runner.Token, in, out)
}

// refused is an answer for which a retry is useless.
type refused struct {
	status int
	body   guestapi.ErrorBody
}

// Error returns the controller's message.
func (e refused) Error() string {
	return fmt.Sprintf("%d %s: %s", e.status, e.body.Code, e.body.Message)
}

// retry repeats fn while the controller does not answer or is busy.
func (r *runner) retry(fn func() error) error {
	pause := 20 * time.Millisecond
	for {
		err := fn()
		no := refused{}
		if err == nil || (errors.As(err, &no) && no.status < 500 && no.status != http.StatusTooManyRequests) {
			return err
		}
		if serr := sleep(r.ctx, pause); serr != nil {
			return serr
		}
		pause = min(2*pause, 2*time.Second)
	}
}

func (r *runner) call(ctx context.Context, method, u, token string, in, out any) error {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	return r.do(ctx, method, u, token, body, out)
}

func (r *runner) do(ctx context.Context, method, u, token string, body io.Reader, out any) error {
	return r.exchange(ctx, method, u, token, body, func(resp *http.Response) error {
		if out == nil {
			return nil
		}
		return json.NewDecoder(resp.Body).Decode(out)
	})
}

func (r *runner) fetch(ctx context.Context, u, token string) (n int64, err error) {
	err = r.exchange(ctx, http.MethodGet, u, token, nil, func(resp *http.Response) (err error) {
		n, err = io.Copy(io.Discard, resp.Body)
		return err
	})
	return n, err
}

func (r *runner) exchange(ctx context.Context, method, u, token string, body io.Reader, read func(*http.Response) error) error {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, u, body)
	if err != nil {
		return err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := r.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		no := refused{status: resp.StatusCode}
		_ = json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&no.body)
		return no
	}
	return read(resp)
}
