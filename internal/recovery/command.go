package recovery

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/store"
)

const usage = `agentlabd db repairs the database while the daemon is not running.

Usage:
  agentlabd db list                       list the backups, the newest first
  agentlabd db restore [--adopt] [BACKUP] restore a backup, by default the newest
                                          one that is usable
  agentlabd db rebuild                    create a database from the files of the
                                          jobs and the sandboxes of the backend

  --adopt                  accept a backup of another installation
  --home DIR, --system     as for agentlabd run
  --json                   print the result as JSON
`

// repair is one run of 'agentlabd db'.
type repair struct {
	home     config.Home
	backends registry.List
	paths    config.Paths
	adopt    bool
	backup   string
	out      report
}

// Command is 'agentlabd db …'.
func Command(ctx context.Context, args []string, known registry.List, stdout io.Writer) (err error) {
	r := repair{backends: known}
	fs := flag.NewFlagSet("agentlabd db", flag.ContinueOnError)
	fs.BoolVar(&r.adopt, "adopt", false, "")
	asJSON := fs.Bool("json", false, "")
	verb := ""
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	r.home, err = config.ParseHome(fs, args)
	named := map[string]int{"list": 0, "restore": 1, "rebuild": 0}
	most, ok := named[verb]
	if err != nil || !ok || fs.NArg() > most || r.adopt && verb != "restore" {
		return config.Usage(usage)
	}
	r.backup = fs.Arg(0)
	if err = r.do(ctx, verb, *asJSON, stdout); err != nil && *asJSON {
		return config.JSONError{Err: err}
	}
	return err
}

func (r *repair) do(ctx context.Context, verb string, asJSON bool, stdout io.Writer) (err error) {
	if r.paths, err = r.home.Paths(); err != nil {
		return err
	}
	if verb == "list" {
		return r.list(ctx, asJSON, stdout)
	}
	if err := r.paths.Ensure(); err != nil {
		return err
	}
	held, err := r.paths.TryLock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, held.Unlock()) }()
	r.out = report{Database: r.paths.Database(), Orphans: []string{}, Refused: []refusal{}, Warnings: []string{}}
	if err := r.finishReplacement(); err != nil {
		return err
	}
	step := r.restore
	if verb == "rebuild" {
		step = r.rebuild
	}
	if err := step(ctx); err != nil {
		return err
	}
	if err := r.fill(ctx); err != nil {
		return err
	}
	if err := r.print(asJSON, stdout); err != nil {
		return err
	}
	if n := len(r.out.Refused); n > 0 {
		return agentlab.Errorf(agentlab.CodeInvalid, "the database was repaired without invalid records (%d, the first: %s)", n, r.out.Refused[0]).
			WithHint("the daemon can be started; invalid records of jobs are in %s with the suffix %s", r.paths.Records(), refusedSuffix)
	}
	return nil
}

func (r *repair) list(ctx context.Context, asJSON bool, stdout io.Writer) error {
	list, err := listBackups(r.paths.Backups())
	if err != nil {
		return err
	}
	type row struct {
		Name      string    `json:"name"`
		Path      string    `json:"path"`
		CreatedAt time.Time `json:"created_at"`
		Size      int64     `json:"size"`
		Jobs      int       `json:"jobs"`
		Sandboxes int       `json:"sandboxes"`
		Problem   string    `json:"problem,omitempty"`
	}
	rows := []row{}
	for _, b := range list {
		sum, err := store.Inspect(ctx, b.path)
		v := row{Name: filepath.Base(b.path), Path: b.path, CreatedAt: b.at, Size: b.size, Jobs: sum.Jobs, Sandboxes: sum.Sandboxes}
		if err != nil {
			v.Problem = err.Error()
		}
		rows = append(rows, v)
	}
	if asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(map[string]any{"items": rows})
	}
	for _, v := range rows {
		what := agentlab.Plural(v.Jobs, "job") + ", " + agentlab.Plural(v.Sandboxes, "sandbox")
		if v.Problem != "" {
			what = "not usable: " + v.Problem
		}
		fmt.Fprintf(stdout, "%s  %s  %d bytes  %s\n", v.Name, v.CreatedAt.Local().Format(time.DateTime), v.Size, what)
	}
	return nil
}

// rebuild ensures that there is an intact database of this installation. It
// creates an empty one if there is none.
func (r *repair) rebuild(ctx context.Context) error {
	if err := r.dropStaged(); err != nil {
		return err
	}
	own, err := installationOf(r.paths)
	if err != nil {
		return err
	}
	sum, err := store.Inspect(ctx, r.paths.Database())
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeBusy || agentlab.CodeOf(err) == agentlab.CodeDenied || sum.Schema > store.NewestSchema():
		if err == nil {
			err = agentlab.Errorf(agentlab.CodeSchema, "the database was written by a newer version of AgentLab").WithHint("use the newer version")
		}
		return err
	case err != nil, sum.Schema == 0, own != "" && sum.Installation != "" && own != sum.Installation:
		if err := r.prepare(ctx, repairRebuild); err != nil {
			return err
		}
		if err := r.replace(); err != nil {
			return err
		}
	}
	return r.adoptID(ctx, own)
}

// adoptID opens the database, which creates or upgrades it, and gives it and the
// state directory the same ID. The database is first marked as unfilled, unless a
// restore has marked it: with only the ID it would match, and a daemon would
// delete every file without a row as a leftover.
func (r *repair) adoptID(ctx context.Context, own string) error {
	st, err := store.Open(ctx, r.paths.Database(), store.Options{})
	if err != nil {
		return err
	}
	id := own
	if id == "" {
		if id, err = st.Fact(ctx, store.FactInstallation); err == nil && id == "" {
			id = agentlab.NewUID()
		}
	}
	mark := ""
	if err == nil {
		mark, err = st.Fact(ctx, store.FactRepair)
	}
	if err == nil && mark == "" {
		err = st.SetFact(ctx, store.FactRepair, repairRebuild)
	}
	if err == nil {
		err = st.SetFact(ctx, store.FactInstallation, id)
	}
	if err = errors.Join(err, st.Close()); err != nil {
		return err
	}
	return writeInstallation(r.paths, id)
}

// fill adds the rows that the database lacks.
func (r *repair) fill(ctx context.Context) (err error) {
	st, err := store.Open(ctx, r.paths.Database(), store.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	mark, err := st.Fact(ctx, store.FactRepair)
	if err != nil {
		return err
	}
	r.out.restored = mark == repairRestore
	files, err := artifact.New(artifact.Config{Dir: r.paths.State, Store: st})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	if err := recoverJobs(ctx, st, files, r.paths.Records(), &r.out); err != nil {
		return err
	}
	if err := r.sandboxes(ctx, st); err != nil {
		return err
	}
	last := math.MaxInt32
	if settings, err := r.backends.Load(r.paths.ConfigFile()); err == nil { // a warning about a damaged configuration was already printed
		last = settings.VMIDRange.Last
	}
	if err := skipNumbers(ctx, st, last, &r.out); err != nil {
		return err
	}
	err = st.AppendEvents(ctx, agentlab.NewEvent(agentlab.EventDaemon, nil, "the database was repaired: %s, %s and %s added",
		agentlab.Plural(r.out.Jobs, "job"), agentlab.Plural(r.out.Artifacts, "artifact"), agentlab.Plural(r.out.Sandboxes, "sandbox")))
	if err != nil {
		return err
	}
	return st.SetFact(ctx, store.FactRepair, "")
}

// sandboxes lists the VMs of the backend that have AgentLab's mark. If the
// backend does not answer, everything else is recovered all the same.
func (r *repair) sandboxes(ctx context.Context, st *store.Store) error {
	if r.out.restored {
		if err := losePooled(ctx, st, time.Now().UTC(), &r.out); err != nil {
			return err
		}
	}
	settings, err := r.backends.Load(r.paths.ConfigFile())
	if err != nil {
		r.out.warnBackendSkipped("of the configuration", err)
		return nil
	}
	log := slog.New(slog.DiscardHandler)
	network := hostnet.ForHost(settings, r.paths, log)
	defer func() { _ = network.Close() }()
	for _, in := range settings.Instances() {
		b, err := r.backends.Open(in, r.paths, registry.Env{
			Config: settings, Images: image.NewStore(r.paths.Images(), image.Options{}), Network: network, Getenv: r.home.Getenv, Log: log,
		})
		if err != nil {
			r.out.warnBackendSkipped(in.Name, err)
			continue
		}
		err = recoverSandboxes(ctx, st, b, time.Now().UTC(), &r.out)
		_ = b.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *repair) print(asJSON bool, stdout io.Writer) error {
	if asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		return enc.Encode(r.out)
	}
	o := r.out
	if o.Backup != "" {
		fmt.Fprintf(stdout, "restored %s\n", o.Backup)
	}
	for _, f := range o.MovedTo {
		fmt.Fprintf(stdout, "the old database was saved: %s\n", f)
	}
	fmt.Fprintf(stdout, "added from the state directory and the backend: %s, %s, %s\n",
		agentlab.Plural(o.Jobs, "job"), agentlab.Plural(o.Artifacts, "artifact"), agentlab.Plural(o.Sandboxes, "sandbox"))
	for _, s := range o.Orphans {
		fmt.Fprintf(stdout, "the backend has a sandbox that was not changed: %s\n", s)
	}
	for _, f := range o.Refused {
		fmt.Fprintf(stdout, "refused: %s\n", f)
	}
	for _, w := range o.Warnings {
		fmt.Fprintf(stdout, "warning: %s\n", w)
	}
	return nil
}
