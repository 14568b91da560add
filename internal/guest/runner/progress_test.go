package runner

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Git's progress is reported, and is not part of its errors.
func TestCloneReportsProgress(t *testing.T) {
	repo := newRepo(t, nil)
	bundle := filepath.Join(t.TempDir(), "b")
	runGit(t, repo, "bundle", "create", "-q", bundle, "HEAD", "main")
	g, err := newGit(dir(t.TempDir()), shellJob("true"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	g.progress = func(step string, percent int) { told = append(told, fmt.Sprint(step, percent)) }
	env := g.environ([2]string{"protocol.file.allow", "always"})
	if _, err := g.run(t.Context(), t.TempDir(), env, "clone", "--progress", bundle, "clone"); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(told, guestapi.StepReceive+"100") {
		t.Errorf("told %q", told)
	}
	_, err = g.run(t.Context(), t.TempDir(), env, "clone", "--progress", "--branch", "nosuch", bundle, "clone")
	if err == nil || strings.Contains(err.Error(), "Cloning into") || strings.Contains(err.Error(), "%") || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("the error is %v", err)
	}
}

func TestGitProgressFilter(t *testing.T) {
	var rest bytes.Buffer
	var told []string
	g := &gitProgress{w: &rest, report: func(step string, percent int) { told = append(told, fmt.Sprint(step, percent)) }}
	in := "Cloning into 'x'...\nremote: Counting objects:  50% (1/2)\rremote: Total 3 (delta 0)\nReceiving objects:   7% (1/14), 1.0 MiB | 3 MiB/s\rReceiving objects: 999% (1/1)\n" +
		"Resolving deltas: 100% (2/2), done.\nUpdating files:  12% (1/8)\rwarning: something\nfatal: no end"
	for i := range in { // byte by byte
		if _, err := g.Write([]byte{in[i]}); err != nil {
			t.Fatal(err)
		}
	}
	g.flush()
	if want := []string{"receive7", "receive100", "resolve100", "checkout12"}; !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	if want := "warning: something\nfatal: no end"; rest.String() != want {
		t.Errorf("the rest is %q, want %q", rest.String(), want)
	}
}

// Progress is reported at intervals, and only in phase clone.
func TestProgressIsThrottled(t *testing.T) {
	c := &control{news: make(chan struct{}, 1)}
	c.report.Phase = "agent"
	if c.progress(guestapi.StepReceive, 1); c.report.Progress != nil {
		t.Error("progress outside the clone was told")
	}
	c.report.Phase = "clone"
	c.progress(guestapi.StepReceive, 2)
	c.progress(guestapi.StepReceive, 3)
	if p := c.report.Progress; p == nil || p.Percent != 2 || len(c.news) != 1 {
		t.Errorf("%+v", p)
	}
	c.progressed = time.Now().Add(-progressPause)
	c.progress(guestapi.StepReceive, 4)
	if c.report.Progress.Percent != 4 {
		t.Errorf("%+v", c.report.Progress)
	}
	if c.phase("agent"); c.report.Progress != nil {
		t.Error("the progress outlives its phase")
	}
}
