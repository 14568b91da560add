package runner

import (
	"bytes"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// progressPause is the minimum time between two reports of progress.
const progressPause = 2 * time.Second

// progress reports the progress of the clone to the controller.
func (c *control) progress(step string, percent int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.report.Phase != "clone" || now.Sub(c.progressed) < progressPause {
		return
	}
	c.progressed = now
	c.report.Progress = &guestapi.Progress{Step: step, Percent: percent}
	wake(c.news)
}

var (
	gitPercent = lazyre.New(`^(remote: )?[A-Z][a-z]+ [a-z]+: +([0-9]{1,3})% \([0-9]+/[0-9]+\)`)
	gitChatter = lazyre.New(`^(remote: )?(Enumerating|Total|Cloning into) `)
)

// gitSteps maps git's names of the steps of a clone.
var gitSteps = map[string]string{"Receiving": guestapi.StepReceive, "Resolving": guestapi.StepResolve, "Updating": guestapi.StepCheckout}

// gitProgress extracts the progress from git's standard error and passes the
// rest on.
type gitProgress struct {
	w      io.Writer
	report func(step string, percent int)
	rest   []byte
}

func (g *gitProgress) Write(p []byte) (int, error) {
	g.rest = append(g.rest, p...)
	for {
		i := bytes.IndexAny(g.rest, "\r\n")
		if i < 0 && len(g.rest) < 4096 {
			return len(p), nil
		}
		line := g.rest
		if i >= 0 {
			line = g.rest[:i+1]
		}
		g.rest = g.rest[len(line):]
		text := string(line)
		if f := gitPercent.FindStringSubmatch(text); f != nil {
			word, _, _ := strings.Cut(strings.TrimPrefix(text, f[1]), " ")
			percent, err := strconv.Atoi(f[2])
			if step := gitSteps[word]; step != "" && len(f[1]) == 0 && err == nil {
				g.report(step, min(percent, 100))
			}
			continue
		}
		if gitChatter.MatchString(text) {
			continue
		}
		if _, err := g.w.Write(line); err != nil {
			return 0, err
		}
	}
}

// flush passes on an unfinished line.
func (g *gitProgress) flush() {
	_, _ = g.w.Write(g.rest)
	g.rest = nil
}

// downloadFile is a file that reports how much of it was downloaded.
type downloadFile struct {
	*os.File
	report   func(step string, percent int)
	n, total int64
}

// expect sets the size of the download; -1 if it is unknown.
func (d *downloadFile) expect(total int64) { d.total = total }

func (d *downloadFile) Write(p []byte) (int, error) {
	n, err := d.File.Write(p)
	if d.n += int64(n); d.total > 0 {
		d.report(guestapi.StepDownload, int(min(d.n*100/d.total, 100)))
	}
	return n, err
}

// ReadFrom hides that of os.File, which would not count bytes.
func (d *downloadFile) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{d}, r)
}
