package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/validation"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// statusOf maps the codes of errors to HTTP statuses.
var statusOf = map[agentlab.Code]int{
	agentlab.CodeInvalid:        http.StatusBadRequest,
	agentlab.CodeDenied:         http.StatusForbidden,
	agentlab.CodeNotFound:       http.StatusNotFound,
	agentlab.CodeExists:         http.StatusConflict,
	agentlab.CodeConflict:       http.StatusConflict,
	agentlab.CodePreflight:      http.StatusUnprocessableEntity,
	agentlab.CodeLimit:          http.StatusTooManyRequests,
	agentlab.CodeInternal:       http.StatusInternalServerError,
	agentlab.CodeSchema:         http.StatusInternalServerError,
	agentlab.CodeUnknownOutcome: http.StatusInternalServerError,
	agentlab.CodeUnsupported:    http.StatusNotImplemented,
	agentlab.CodeBusy:           http.StatusServiceUnavailable,
	agentlab.CodeUnavailable:    http.StatusServiceUnavailable,
	agentlab.CodeTimeout:        http.StatusGatewayTimeout,
	agentlab.CodeNoSpace:        http.StatusInsufficientStorage,
}

// problem is the body of every failed call (RFC 9457).
type problem api.Error

// Error, GetStatus and ContentType implement the error interface of huma.
func (p *problem) Error() string             { return p.Detail }
func (p *problem) GetStatus() int            { return p.Status }
func (p *problem) ContentType(string) string { return problemType }

const problemType = "application/problem+json"

// problemOf converts an error of a service to what a caller may see: code,
// message, hint and field of the first agentlab.Error in its chain. The text
// of any other error is only logged.
func problemOf(err error) *problem {
	e, ok := errors.AsType[*agentlab.Error](err)
	switch {
	case ok:
	case errors.Is(err, context.DeadlineExceeded):
		e = agentlab.Errorf(agentlab.CodeTimeout, "it took too long")
	case errors.Is(err, context.Canceled):
		// A client that has cancelled its call reads no answer.
		e = agentlab.Errorf(agentlab.CodeUnavailable, "the call was cancelled, because the daemon stops").
			WithHint("run the command again when the daemon runs; 'agentlab daemon status' shows that")
	default:
		e = agentlab.Errorf(agentlab.CodeInternal, "internal error").
			WithHint("the cause is in the daemon's log: agentlab daemon logs")
	}
	status, ok := statusOf[e.Code]
	if !ok {
		status = http.StatusInternalServerError
	}
	return &problem{
		Status: status, Title: http.StatusText(status), Detail: e.Message,
		Code: string(e.Code), Hint: agentlab.HintOf(e), Field: e.Field,
	}
}

// writeProblem answers a request that did not reach huma or that huma did not
// accept.
func writeProblem(w http.ResponseWriter, err error) {
	p := problemOf(err)
	w.Header().Set("Content-Type", problemType)
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p)
}

// adaptHuma sets AgentLab's error type and strict field names in huma, which
// is possible only by its package variables. No other package of AgentLab
// imports huma.
var adaptHuma = sync.OnceFunc(func() {
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		return humaProblem(status, msg, errs)
	}
	huma.ValidateStrictCasing = true
	huma.DefaultArrayNullable = false // arrays are never null, neither in requests nor in answers
})

// humaProblem converts an error of huma, which has an HTTP status, to a
// problem. All of them are errors in the request, except a body that could not
// be read completely, and bugs.
func humaProblem(status int, msg string, errs []error) *problem {
	switch status {
	case http.StatusRequestTimeout:
		return problemOf(agentlab.Errorf(agentlab.CodeTimeout, "%s", msg))
	case http.StatusInternalServerError:
		for _, err := range errs {
			if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
				return problemOf(errTooLarge(tooLarge.Limit))
			}
		}
		return problemOf(errors.Join(errs...))
	}
	e := agentlab.Errorf(agentlab.CodeInvalid, "%s", msg)
	if len(errs) > 0 {
		e = invalid(errs[0])
	}
	if status == http.StatusUnsupportedMediaType {
		e = e.WithHint("send Content-Type: application/json")
	}
	return problemOf(e)
}

// invalid returns the error for a field that huma's validation rejected.
func invalid(err error) *agentlab.Error {
	d, ok := errors.AsType[*huma.ErrorDetail](err)
	if !ok {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s", err.Error())
	}
	_, field, _ := strings.Cut(d.Location, ".") // without "body", "query", "path"
	e := agentlab.Errorf(agentlab.CodeInvalid, "%s", d.Message)
	if missing, ok := missingProperty(d.Message); ok {
		if field != "" {
			field += "."
		}
		field += missing
		e.Message = "missing"
	}
	if d.Message == validation.MsgUnexpectedProperty {
		e.Message = "unknown field"
		e = e.WithHint("see docs/api.md for the fields of this call")
	}
	if field == "" {
		field = d.Location
	}
	return e.WithField(field)
}

// missingProperty returns the name of a missing required property from huma's
// message, because huma's location is that of the object around it.
func missingProperty(msg string) (string, bool) {
	before, after, _ := strings.Cut(validation.MsgExpectedRequiredProperty, "%s")
	name, ok := strings.CutPrefix(msg, before)
	if !ok {
		return "", false
	}
	return strings.CutSuffix(name, after)
}

func errTooLarge(limit int64) error {
	return agentlab.Errorf(agentlab.CodeInvalid, "the body is larger than %s", bytesText(limit))
}

func bytesText(n int64) string {
	for _, u := range []struct {
		size int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.size && n%u.size == 0 {
			return fmt.Sprintf("%d %s", n/u.size, u.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// bodyError returns the error for a body that could not be read, if the caller
// caused it.
func bodyError(err error) error {
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return errTooLarge(tooLarge.Limit)
	}
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	if nerr, ok := errors.AsType[net.Error](err); ok && nerr.Timeout() {
		return agentlab.Errorf(agentlab.CodeTimeout, "timed out reading the request body")
	}
	return err
}
