package hostnet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/internal/egresslog"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// bootSuffix is the suffix of the file with the boot ID of the host at the
// last write of a log.
const bootSuffix = ".boot"

// uidForm matches a UID that is safe in a file name.
var uidForm = lazyre.New(`^[0-9A-Za-z]{1,64}$`)

func validID(id ID) error {
	if id.VMID <= 0 || !uidForm.MatchString(id.UID) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d and %q are not a VMID and UID of a sandbox", id.VMID, id.UID).WithField("ref")
	}
	return nil
}

// A guest's files: DIR/VMID-UID with one of these suffixes.
const (
	logSuffix   = ".log"   // its egress log
	namesSuffix = ".names" // the answers of our DNS server, because the guest may cache them
)

// maxNamesBytes bounds the file with the names that a guest resolved. It is
// enough for all names that can be in force.
const maxNamesBytes = 2 << 20

// namesPath is the file with the names that a guest resolved.
func (l *Local) namesPath(id ID) string {
	return strings.TrimSuffix(l.logPath(id), logSuffix) + namesSuffix
}

// openNames opens the journal of the names that a guest resolves.
func (l *Local) openNames(id ID) (*bounded.Log, error) {
	names, err := bounded.OpenLog(l.namesPath(id), maxNamesBytes, 0, time.Now)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot store the names that sandbox %d resolved: %w", id.VMID, err)
	}
	return names, nil
}

// recordAnswer stores an answer to a guest's DNS question.
func (l *Local) recordAnswer(vmid int, t nft.Answer) {
	l.mu.Lock()
	g := l.guests[vmid]
	l.mu.Unlock()
	line, err := json.Marshal(t)
	if g != nil && err == nil {
		_, _ = g.names.Write(append(line, '\n'))
	}
}

// readAnswers reads the answers that a guest got from earlier processes, the
// earlier first. Answers that cannot be read are ignored: the guest has to ask
// again.
func (l *Local) readAnswers(id ID) (out []nft.Answer) {
	for _, path := range []string{l.namesPath(id) + bounded.OldSuffix, l.namesPath(id)} {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			var t nft.Answer
			if json.Unmarshal([]byte(line), &t) == nil {
				out = append(out, t)
			}
		}
	}
	return out
}

func (l *Local) logPath(id ID) string {
	return filepath.Join(l.cfg.Dir, fmt.Sprintf("%d-%s"+logSuffix, id.VMID, id.UID))
}

// openLog opens the egress log of a guest for appending.
func (l *Local) openLog(id ID) (*egresslog.Log, error) {
	failed := func(err error) error {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot open the network log of sandbox %d: %w", id.VMID, err)
	}
	if err := validID(id); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(l.cfg.Dir, 0o700); err != nil {
		return nil, failed(err)
	}
	path := l.logPath(id)
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, failed(err)
	}
	last, err := os.ReadFile(path + bootSuffix)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, failed(err)
	}
	log, err := egresslog.Open(path, id.VMID, string(last) != string(boot))
	if err != nil {
		return nil, failed(err)
	}
	if string(last) != string(boot) { // after the gap in the sequence numbers: after a crash before this there is another gap
		if err := os.WriteFile(path+bootSuffix, boot, 0o600); err != nil {
			_ = log.Close()
			return nil, failed(err)
		}
	}
	return log, nil
}

// record stores every decision about a guest.
func (l *Local) record(vmid int, r agentlab.EgressRecord) {
	l.mu.Lock()
	g := l.guests[vmid]
	l.mu.Unlock()
	if g != nil {
		g.log.Write(r) // no effect if it was closed in the meantime
	}
}

// EgressLog returns the records of a guest whose Seq is above after, oldest
// first, at most limit of them. A guest that was never on the bridge has none.
func (l *Local) EgressLog(ctx context.Context, id ID, after int64, limit int) ([]agentlab.EgressRecord, error) {
	if err := validID(id); err != nil {
		return nil, err
	}
	return egresslog.Read(ctx, l.logPath(id), after, limit)
}

func (l *Local) removeLog(id ID) error {
	if err := validID(id); err != nil {
		return err
	}
	log, names := l.logPath(id), l.namesPath(id)
	for _, p := range []string{log, log + bounded.OldSuffix, log + bootSuffix, names, names + bounded.OldSuffix} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return agentlab.Errorf(agentlab.CodeUnavailable, "cannot remove the network log of sandbox %d: %w", id.VMID, err)
		}
	}
	return nil
}

// sweep removes the records of guests that are not among these.
func (l *Local) sweep(guests []Guest) {
	keep := map[string]bool{}
	for _, g := range guests {
		keep[strings.TrimSuffix(filepath.Base(l.logPath(g.ID)), logSuffix)] = true
	}
	entries, err := os.ReadDir(l.cfg.Dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		name, _, ours := strings.Cut(e.Name(), ".")
		if ours && !keep[name] {
			if err := os.Remove(filepath.Join(l.cfg.Dir, e.Name())); err != nil {
				l.log.Warn("cannot remove an old network log of a sandbox", "file", e.Name(), "err", err)
			}
		}
	}
}
