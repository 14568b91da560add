package cli

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
)

// Bounds of the files that a remote daemon is reached with.
const (
	maxTokenFileBytes = 4 << 10
	maxCAFileBytes    = 4 << 20
)

// remoteURL is the daemon over TCP that is meant; "" means one of this machine.
// What is said on the command line counts more than the environment.
func (a *App) remoteURL() (string, error) {
	switch {
	case a.host != "" && a.socket != "":
		return "", usageErrorf("--host and --socket exclude each other")
	case a.host != "" || a.socket != "":
		return a.host, nil
	}
	return os.Getenv("AGENTLAB_HOST"), nil
}

// elsewhere tells whether a certain daemon was named, which is never started.
func (a *App) elsewhere() bool {
	return a.socket != "" || a.host != "" || os.Getenv("AGENTLAB_HOST") != ""
}

// remote returns a client of the daemon at url.
func (a *App) remote(url string) (*client.Client, error) {
	r := client.Remote{URL: url, Pin: os.Getenv("AGENTLAB_PIN"), Token: os.Getenv("AGENTLAB_TOKEN")}
	file := a.tokenFile
	if file == "" && r.Token == "" {
		file = os.Getenv("AGENTLAB_TOKEN_FILE")
	}
	if file != "" {
		text, err := readPrivate(file)
		if err != nil {
			return nil, err
		}
		r.Token = strings.TrimSpace(text)
	}
	if ca := os.Getenv("AGENTLAB_CA_FILE"); ca != "" {
		pem, err := readBounded(ca, maxCAFileBytes)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "cannot read the authorities: %w", err).WithField("AGENTLAB_CA_FILE")
		}
		r.CA = []byte(pem)
	}
	return client.NewRemote(r)
}

// readPrivate reads a file with a token, which nobody else may be able to
// read: whoever can is the bearer too.
func readPrivate(name string) (string, error) {
	info, err := os.Stat(name)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read the token: %w", err)
	}
	if info.Mode().Type()&fs.ModeNamedPipe == 0 && info.Mode().Perm()&0o077 != 0 {
		return "", agentlab.Errorf(agentlab.CodeDenied, "others can use %s (mode %04o)", name, info.Mode().Perm()).
			WithHint("chmod 600 %s; and revoke the token if others may have read it", shellQuote(name))
	}
	text, err := readBounded(name, maxTokenFileBytes)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read the token: %w", err)
	}
	return text, nil
}

func readBounded(name string, limit int64) (string, error) {
	f, err := os.Open(name) //nolint:gosec // the caller's own choice
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = agentlab.Errorf(agentlab.CodeInvalid, "%s is larger than %d bytes", name, limit)
	}
	return string(b), err
}

// writePrivate writes a new file that only its owner can read. One that is
// there is left alone.
func writePrivate(name, text string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600) //nolint:gosec // the caller's own choice
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "cannot write the token: %w", err).WithHint("name a file that does not exist yet")
	}
	_, err = io.WriteString(f, text)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// sameDaemon returns the words that let another run of this program reach the same
// daemon. The token itself goes with the environment, never with the words.
func (a *App) sameDaemon() ([]string, error) {
	url, err := a.remoteURL()
	if err != nil {
		return nil, err
	}
	if url == "" {
		socket, err := a.socketPath()
		return []string{"--socket", socket}, err
	}
	words := []string{"--host", url}
	if a.tokenFile != "" {
		file, err := filepath.Abs(a.tokenFile)
		if err != nil {
			return nil, err
		}
		words = append(words, "--token-file", file)
	}
	return words, nil
}
