package agentcmd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

// Run runs an agent in the foreground with the environment env: output is
// written to stdout and stderr, signals are passed on. It returns the agent's
// exit code, 128+n if signal n ended it.
func Run(name, taskFile string, env []string, stdout, stderr io.Writer) int {
	c, err := prepare(name, taskFile, env)
	if err != nil {
		return reportError(stderr, err)
	}
	in, err := os.Open(c.stdin)
	if err != nil {
		return reportError(stderr, err)
	}
	defer func() { _ = in.Close() }()
	cmd := &exec.Cmd{Path: c.path, Args: c.argv, Env: c.env, Stdin: in, Stdout: stdout, Stderr: stderr}
	if c.agent.render != nil {
		r := c.agent.render(stdout)
		defer func() { _ = r.Close() }()
		cmd.Stdout = r
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return reportError(stderr, err)
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case s := <-signals:
				_ = cmd.Process.Signal(s)
			case <-done:
				return
			}
		}
	}()
	err = cmd.Wait()
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		return exitCode(st)
	}
	return reportError(stderr, err)
}

func exitCode(st syscall.WaitStatus) int {
	if st.Signaled() {
		return 128 + int(st.Signal())
	}
	return st.ExitStatus()
}

// reportError writes why an agent was not run and returns the exit code for it.
func reportError(w io.Writer, err error) int {
	fmt.Fprintf(w, "agentlab-agent: %v\n", err)
	var missing notInstalled
	if errors.As(err, &missing) {
		return ExitNotFound
	}
	return ExitNotRun
}
