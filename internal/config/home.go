package config

import (
	"encoding/json"
	"flag"
	"io"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Home says whose files a command of agentlabd works with: --home DIR,
// --system, or without both those of the user.
type Home struct {
	Dir    string
	System bool
}

// ParseHome adds --home and --system to the flags of a command and parses its
// arguments. fs must return errors.
func ParseHome(fs *flag.FlagSet, args []string) (Home, error) {
	var h Home
	fs.SetOutput(io.Discard)
	fs.StringVar(&h.Dir, "home", "", "")
	fs.BoolVar(&h.System, "system", false, "")
	if err := fs.Parse(args); err != nil {
		return h, agentlab.Errorf(agentlab.CodeInvalid, "%w", err)
	}
	given := false
	fs.Visit(func(f *flag.Flag) { given = given || f.Name == "home" })
	switch {
	case given && h.Dir == "":
		return h, agentlab.Errorf(agentlab.CodeInvalid, "--home needs a directory")
	case given && h.System:
		return h, agentlab.Errorf(agentlab.CodeInvalid, "--home and --system cannot be used together")
	}
	return h, nil
}

// Getenv returns the environment, in which --home and --system replace
// AGENTLAB_HOME.
func (h Home) Getenv(key string) string {
	if key == "AGENTLAB_HOME" && (h.Dir != "" || h.System) {
		return h.Dir
	}
	return os.Getenv(key)
}

// Paths finds the paths of the home.
func (h Home) Paths() (Paths, error) { return ResolvePaths(h.Getenv, h.System) }

// Usage is the error of a command that was called in a wrong way: what to print
// instead of an error.
type Usage string

func (u Usage) Error() string { return string(u) }

// JSONError is an error of a command that is printed as JSON.
type JSONError struct{ Err error }

func (e JSONError) Error() string { return e.Err.Error() }

// Unwrap returns the error.
func (e JSONError) Unwrap() error { return e.Err }

// JSON returns the line to print.
func (e JSONError) JSON() string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(map[string]any{"error": map[string]string{"code": string(agentlab.CodeOf(e.Err)), "message": e.Err.Error(), "hint": agentlab.HintOf(e.Err)}})
	return b.String()
}
