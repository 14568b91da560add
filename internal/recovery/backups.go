package recovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// backupEvery is the time between two backups.
const backupEvery = time.Hour

// Space watches the disk; *hostspace.Guard implements it.
type Space interface {
	Start() error // returns code no_space if the disk is too full for a copy
}

// BackupsConfig is what Backups needs.
type BackupsConfig struct {
	Dir    string
	Store  *store.Store
	Keep   config.Backups
	Space  Space
	Clock  func() time.Time
	Logger *slog.Logger
}

// Backups makes copies of the database while it is in use, and keeps a limited
// number of them.
type Backups struct {
	cfg BackupsConfig

	inProgress sync.Mutex // held during a copy

	mu   sync.Mutex
	last error // of the latest attempt
}

// backup is one copy. Copies are ordered by number and not by time, because
// the clock may have been set back.
type backup struct {
	number int
	at     time.Time
	path   string
	size   int64
}

// NewBackups returns Backups that have copied nothing yet.
func NewBackups(cfg BackupsConfig) *Backups { return &Backups{cfg: cfg} }

const backupTime = "20060102T150405Z"

var backupName = regexp.MustCompile(`^([0-9]{6,12})-([0-9]{8}T[0-9]{6}Z)\.db$`)

// listBackups returns the copies in dir, the newest first.
func listBackups(dir string) ([]backup, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fsfault.At(dir, err)
	}
	var out []backup
	for _, e := range entries {
		m := backupName.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		b := backup{path: filepath.Join(dir, e.Name())}
		if b.number, err = strconv.Atoi(m[1]); err != nil {
			continue
		}
		if b.at, err = time.Parse(backupTime, m[2]); err != nil {
			continue
		}
		st, err := e.Info()
		if err != nil || !st.Mode().IsRegular() {
			continue
		}
		b.size = st.Size()
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b backup) int { return cmp.Compare(b.number, a.number) })
	return out, nil
}

// Run makes a copy if the newest one is old, and then every hour until ctx
// ends.
func (b *Backups) Run(ctx context.Context) error {
	if b.cfg.Keep.Newest == 0 {
		return nil
	}
	var wait time.Duration
	if list, err := listBackups(b.cfg.Dir); err == nil && len(list) > 0 {
		// A time in the future has no meaning: the clock was set back.
		if age := b.cfg.Clock().Sub(list[0].at); age >= 0 && age < backupEvery {
			wait = backupEvery - age
		}
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		if _, err := b.Make(ctx); err != nil && ctx.Err() == nil {
			b.cfg.Logger.Error("the database was not backed up", "err", err)
		}
		t.Reset(backupEvery)
	}
}

// Make makes one copy and deletes surplus copies. After an error no copy is
// deleted.
func (b *Backups) Make(ctx context.Context) (api.Backup, error) {
	b.inProgress.Lock()
	defer b.inProgress.Unlock()
	out, err := b.copy(ctx)
	b.mu.Lock()
	b.last = err
	b.mu.Unlock()
	return out, err
}

func (b *Backups) copy(ctx context.Context) (api.Backup, error) {
	if err := b.cfg.Space.Start(); err != nil {
		return api.Backup{}, err
	}
	list, err := listBackups(b.cfg.Dir)
	if err != nil {
		return api.Backup{}, err
	}
	next := backup{number: 1, at: b.cfg.Clock().UTC().Truncate(time.Second)}
	if len(list) > 0 {
		next.number = list[0].number + 1
	}
	next.path = filepath.Join(b.cfg.Dir, fmt.Sprintf("%06d-%s.db", next.number, next.at.Format(backupTime)))
	if err := b.cfg.Store.Backup(ctx, next.path); err != nil {
		return api.Backup{}, err
	}
	st, err := os.Stat(next.path)
	if err != nil {
		return api.Backup{}, fsfault.At(next.path, err)
	}
	for _, old := range expiredBackups(append([]backup{next}, list...), b.cfg.Keep) {
		if err := os.Remove(old.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			b.cfg.Logger.Warn("an old backup was not removed", "path", old.path, "err", err)
		}
	}
	return api.Backup{Path: next.path, Size: st.Size(), CreatedAt: next.at}, nil
}

// expiredBackups returns the copies of list, the newest first, that are not kept:
// after the newest ones, all except the last of each day.
func expiredBackups(list []backup, keep config.Backups) (out []backup) {
	days, further := map[string]bool{}, 0
	for i, b := range list {
		day := b.at.Format(time.DateOnly)
		switch {
		case i < max(keep.Newest, 1):
		case !days[day] && further < keep.Daily:
			further++
		default:
			out = append(out, b)
		}
		days[day] = true
	}
	return out
}

// Findings reports that the newest backup failed.
func (b *Backups) Findings() []backend.Finding {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := backend.Finding{Name: "database backup", Level: backend.LevelOK, Detail: "the database is backed up every hour"}
	switch {
	case b.last != nil:
		f.Level, f.Detail = backend.LevelWarn, "the last backup of the database failed: "+b.last.Error()
		f.Remedy = cmp.Or(agentlab.HintOf(b.last), "see 'agentlab daemon logs', then try again: agentlab db backup")
	case b.cfg.Keep.Newest == 0:
		f.Detail = "backups.newest in config.yaml is 0: the database is not backed up"
	}
	return []backend.Finding{f}
}
