package guestserver

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// status maps codes to HTTP statuses, here and nowhere else for this plane.
func status(code agentlab.Code) int {
	switch code {
	case agentlab.CodeInvalid:
		return http.StatusBadRequest
	case agentlab.CodeDenied:
		return http.StatusUnauthorized
	case agentlab.CodeNotFound:
		return http.StatusNotFound
	case agentlab.CodeExists, agentlab.CodeConflict:
		return http.StatusConflict
	case agentlab.CodeLimit:
		return http.StatusRequestEntityTooLarge
	case agentlab.CodeNoSpace:
		return http.StatusInsufficientStorage
	case agentlab.CodeBusy:
		return http.StatusTooManyRequests
	case agentlab.CodeTimeout:
		return http.StatusRequestTimeout
	case agentlab.CodeUnsupported:
		return http.StatusNotImplemented
	case agentlab.CodeUnavailable, agentlab.CodeUnknownOutcome:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// fail answers an error. Its text goes to the guest only when the guest's own
// request is at fault.
func (g *guest) fail(w http.ResponseWriter, r *http.Request, err error) {
	code := agentlab.CodeOf(err)
	st := status(code)
	msg := "the controller cannot do this now"
	if own, ok := errors.AsType[*agentlab.Error](err); ok && st < 500 {
		msg = own.Message
	}
	if st >= 500 && r.Context().Err() == nil { // else it is the guest that broke off
		g.log.Error("guest call failed", "method", r.Method, "pattern", r.Pattern, "err", err)
	} else {
		g.log.Debug("guest call refused", "method", r.Method, "pattern", r.Pattern, "code", code)
	}
	writeError(w, st, string(code), msg)
}

func writeError(w http.ResponseWriter, status int, code, msg string) {
	// What is left of a refused body is not worth reading.
	w.Header().Set("Connection", "close")
	writeJSON(w, status, guestapi.ErrorBody{Code: code, Message: msg})
}

// answerTimeout is how long a guest may leave an answer unread.
const answerTimeout = 30 * time.Second

func writeJSON(w http.ResponseWriter, status int, v any) {
	p, err := json.Marshal(v)
	if err != nil {
		status, p = http.StatusInternalServerError, []byte(`{"code":"internal","message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(answerTimeout)) // not every ResponseWriter of a test can
	w.WriteHeader(status)
	_, _ = w.Write(append(p, '\n')) // the guest may be gone
	_ = rc.Flush()
	_ = rc.SetWriteDeadline(time.Time{})
}

// readAll reads a body of at most limit bytes.
func readAll(r io.Reader, limit int64) ([]byte, error) {
	p, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, bodyError(err)
	}
	if int64(len(p)) > limit {
		return nil, agentlab.Errorf(agentlab.CodeLimit, "the body exceeds %d bytes", limit)
	}
	return p, nil
}

// bodyError gives an error of reading a body its code: it is the guest's.
func bodyError(err error) error {
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	return &agentlab.Error{Code: agentlab.CodeInvalid, Message: "the body broke off", Err: err}
}
