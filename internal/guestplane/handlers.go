package guestplane

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// bootstrap exchanges the one-time token. The answer is the same for every
// invalid token.
func (g *guest) bootstrap(w http.ResponseWriter, r *http.Request, _ string) {
	if !g.bootstraps.AllowN(g.s.cfg.Clock(), 1) {
		tooMany(w)
		return
	}
	p, err := readAll(r.Body, g.s.cfg.Limits.JSONBytes)
	var req guestapi.BootstrapRequest
	if err == nil {
		err = guestcheck.Decode(p, &req)
	}
	if err != nil {
		g.fail(w, r, err)
		return
	}
	began := time.Now()
	resp, err := g.fetch(r.Context(), req)
	switch agentlab.CodeOf(err) {
	case "":
		g.log.Info("bootstrap fetched")
		writeJSON(w, http.StatusOK, resp)
	case agentlab.CodeDenied, agentlab.CodeNotFound, agentlab.CodeInvalid, agentlab.CodeConflict:
		g.log.Warn("bootstrap refused", "err", err)
		waitUntil(r.Context(), began.Add(g.s.cfg.Limits.Refusal))
		writeError(w, http.StatusForbidden, string(agentlab.CodeDenied), "the bootstrap token is not valid")
	default:
		g.fail(w, r, err)
	}
}

func waitUntil(ctx context.Context, t time.Time) {
	select {
	case <-time.After(time.Until(t)):
	case <-ctx.Done():
	}
}

// fetch always looks up the token, so that a request for another sandbox takes
// the same time.
func (g *guest) fetch(ctx context.Context, req guestapi.BootstrapRequest) (guestapi.BootstrapResponse, error) {
	ours := req.VMID == g.vmid && plausibleToken(req.Token)
	hash := hashToken(req.Token)
	if !ours {
		hash = hashToken("") // of no token
	}
	resp, err := g.s.cfg.Bootstrap.Exchange(ctx, g.vmid, hash)
	if !ours {
		return guestapi.BootstrapResponse{}, agentlab.Errorf(agentlab.CodeDenied, "the request is not for this sandbox")
	}
	if err == nil {
		g.s.cfg.Jobs.Started(context.WithoutCancel(ctx), g.vmid)
	}
	return resp, err
}

func (g *guest) report(w http.ResponseWriter, r *http.Request, jobID string) {
	p, err := readAll(r.Body, g.s.cfg.Limits.JSONBytes)
	var rep guestapi.Report
	if err == nil {
		err = guestcheck.Decode(p, &rep)
	}
	if err != nil {
		g.fail(w, r, err)
		return
	}
	g.redactReport(r.Context(), jobID, &rep)
	d, err := g.s.cfg.Jobs.Report(r.Context(), g.vmid, rep)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, d)
}

// redactor returns the redactor of a job. Its error is never caused by the
// guest and may contain data of the host, so the guest does not receive it.
func (g *guest) redactor(ctx context.Context, jobID string) (*redact.Redactor, error) {
	red, err := g.s.cfg.Bootstrap.Redactor(ctx, jobID)
	if err != nil {
		g.log.Error("cannot redact data of a guest", "job", jobID, "err", err)
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the controller cannot do this now")
	}
	return red, nil
}

// redactReport removes the job's secrets from all text of a report. The
// message is shortened to one line only afterwards, because a shortened line
// may end in a part of a secret. Then it is redacted again, because joining
// lines may produce a secret.
func (g *guest) redactReport(ctx context.Context, jobID string, rep *guestapi.Report) {
	if rep.Message == "" && (rep.Result == nil || rep.Result.Branch == "") {
		return
	}
	red, err := g.redactor(ctx, jobID)
	if err != nil {
		rep.Message = "(the message is withheld: it could not be redacted)"
		if rep.Result != nil {
			rep.Result.Branch = ""
		}
		return
	}
	rep.Message = red.String(agentlab.Reason(red.String(rep.Message)))
	if rep.Result != nil && red.String(rep.Result.Branch) != rep.Result.Branch {
		rep.Result.Branch = "redacted"
	}
}

// narrowNetwork handles the network policy of the repository.
func (g *guest) narrowNetwork(w http.ResponseWriter, r *http.Request, _ string) {
	p, err := readAll(r.Body, g.s.cfg.Limits.JSONBytes)
	var n guestapi.NetworkNarrow
	if err == nil {
		err = guestcheck.Decode(p, &n)
	}
	if err == nil {
		err = g.s.cfg.Jobs.NarrowNetwork(r.Context(), g.vmid, n)
	}
	if err != nil {
		g.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

const maxWait = 55 // seconds

func (g *guest) directive(w http.ResponseWriter, r *http.Request, _ string) {
	wait, err := queryInt(r, "wait", maxWait)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	d, err := g.s.cfg.Jobs.Directive(r.Context(), g.vmid, time.Duration(wait)*time.Second)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, d)
}

// queryInt reads a number from 0 to most; missing means 0.
func queryInt(r *http.Request, name string, most int64) (int64, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > most {
		return 0, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a number from 0 to %d", name, most).WithField(name)
	}
	return n, nil
}

// appendLog appends to the agent log the part of a chunk that can be redacted:
// an end that may be the beginning of a secret is left for the next call,
// unless the runner says that nothing follows. Secrets are masked in place, so
// the offsets of runner and controller stay the same.
func (g *guest) appendLog(w http.ResponseWriter, r *http.Request, jobID string) {
	ack, err := g.takeLog(r, jobID)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, ack)
}

func (g *guest) takeLog(r *http.Request, jobID string) (guestapi.LogAck, error) {
	var none guestapi.LogAck
	offset, err := queryInt(r, "offset", 1<<50)
	if err != nil {
		return none, err
	}
	final, err := queryInt(r, "final", 1)
	if err != nil {
		return none, err
	}
	p, err := readAll(r.Body, g.s.cfg.Limits.LogChunk)
	if err != nil {
		return none, err
	}
	g.logMu.Lock() // the size must not change between the read and the append
	defer g.logMu.Unlock()
	if err := g.jobRunning(r, agentlab.GrantRunner); err != nil {
		return none, err
	}
	size, err := g.s.cfg.Artifacts.LogSize(r.Context(), jobID)
	if err != nil {
		return none, err
	}
	if offset > size || offset+int64(len(p)) <= size {
		// An empty append reports whether the quota is used up.
		held, full, err := g.s.cfg.Artifacts.AppendLog(r.Context(), jobID, size, nil)
		return guestapi.LogAck{Size: held, Full: full}, err
	}
	red, err := g.redactor(r.Context(), jobID)
	if err != nil {
		return none, err
	}
	before, err := g.logTail(r.Context(), jobID, size)
	if err != nil {
		return none, err
	}
	p = p[size-offset:]
	settled := len(p)
	if final == 1 {
		red.MaskEnd(before, p)
	} else {
		settled = red.Mask(before, p)
	}
	size, full, err := g.s.cfg.Artifacts.AppendLog(r.Context(), jobID, size, p[:settled])
	return guestapi.LogAck{Size: size, Full: full}, err
}

// logTail reads as much of the end of a job's log as redaction needs.
func (g *guest) logTail(ctx context.Context, jobID string, size int64) ([]byte, error) {
	log, err := g.s.cfg.Artifacts.Log(ctx, jobID, max(size-redact.Context, 0), false)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	return io.ReadAll(io.LimitReader(log, redact.Context))
}

func (g *guest) repo(w http.ResponseWriter, r *http.Request, jobID string) {
	f, size, err := g.s.cfg.Artifacts.RepoBundle(r.Context(), jobID)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	defer func() { _ = f.Close() }()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	out := &deadlineWriter{w: w, rc: http.NewResponseController(w), stall: g.s.cfg.Limits.StallTimeout}
	defer out.end()
	if _, err := io.CopyN(out, f, size); err != nil {
		g.log.Debug("the repository bundle was not sent whole", "err", err)
		panic(http.ErrAbortHandler) // the guest must not treat it as complete
	}
}

// redactedUploads are the text files that the runner itself writes. The rest
// is the agent's work, which must not be changed.
var redactedUploads = []string{agentlab.ArtifactLog, "report.json"}

func (g *guest) upload(w http.ResponseWriter, r *http.Request, jobID string) {
	p := r.PathValue("path")
	if err := agentlab.ValidateArtifactPath(p); err != nil {
		g.fail(w, r, err)
		return
	}
	red, err := g.redactor(r.Context(), jobID)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	p = red.String(p) // names are also stored, listed and logged
	src := &uploadBody{r: r.Body, atEnd: func() error { return g.jobRunning(r, agentlab.GrantUpload) }}
	var in io.Reader = src
	if slices.Contains(redactedUploads, p) {
		in = red.Reader(src)
	}
	a, err := g.s.cfg.Artifacts.Put(r.Context(), jobID, p, in)
	if src.err != nil {
		err = bodyError(src.err)
	}
	if err != nil {
		g.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, guestapi.UploadAck{Path: a.Path, Size: a.Size, SHA256: a.SHA256})
}

// uploadBody records that an upload failed on the guest's side. An error of
// atEnd is a failure too.
type uploadBody struct {
	r     io.Reader
	atEnd func() error
	err   error
}

func (s *uploadBody) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if errors.Is(err, io.EOF) {
		if end := s.atEnd(); end != nil {
			err = end
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}
