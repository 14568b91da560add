package store

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// combinations returns the results of list for each combination of settings, with
// and without each.
func combinations[F any](settings []func(*F), list func(F) (string, []any)) (tails []string, args [][]any) {
	for set := range 1 << len(settings) {
		var f F
		for i, apply := range settings {
			if set&(1<<i) != 0 {
				apply(&f)
			}
		}
		tail, a := list(f)
		tails, args = append(tails, tail), append(args, a)
	}
	return tails, args
}

// TestListsUseIndexes checks that no list scans its table or sorts it, with any
// combination of filters that the API has: a page costs the same however many rows
// there are.
func TestListsUseIndexes(t *testing.T) {
	s := newStore(t)
	check := func(query string, args []any) {
		t.Helper()
		rows, err := s.r.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+query, args...)
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		defer func() { _ = rows.Close() }()
		var plan []string
		for rows.Next() {
			var id, parent, unused int
			var detail string
			if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
				t.Fatal(err)
			}
			plan = append(plan, detail)
		}
		bad := slices.ContainsFunc(plan, func(line string) bool {
			return strings.Contains(line, "TEMP B-TREE") || strings.HasPrefix(line, "SCAN") && !strings.Contains(line, "USING INDEX")
		})
		if bad || len(plan) == 0 || rows.Err() != nil {
			t.Errorf("%s\n  %s", query, strings.Join(plan, "\n  "))
		}
	}
	for name, list := range map[string]func() ([]string, [][]any){
		sandboxes.selectSQL: func() ([]string, [][]any) {
			return combinations([]func(*agentlab.SandboxFilter){
				func(f *agentlab.SandboxFilter) { f.States = []agentlab.SandboxState{agentlab.SandboxReady} },
				func(f *agentlab.SandboxFilter) { f.Destroyed = true },
				func(f *agentlab.SandboxFilter) { f.NoPooled = true },
				func(f *agentlab.SandboxFilter) { f.AfterVMID = 7 },
				func(f *agentlab.SandboxFilter) { f.Limit = 10 },
			}, sandboxList)
		},
		jobs.selectSQL: func() ([]string, [][]any) {
			return combinations([]func(*agentlab.JobFilter){
				func(f *agentlab.JobFilter) { f.Statuses = []agentlab.JobStatus{agentlab.JobRunning} },
				func(f *agentlab.JobFilter) { f.SandboxVMID = 7 },
				func(f *agentlab.JobFilter) { f.ParentID = "job-x" },
				func(f *agentlab.JobFilter) { f.Before = agentlab.JobKey{CreatedAt: epoch, ID: "job-y"} },
				func(f *agentlab.JobFilter) { f.Limit = 10 },
			}, jobList)
		},
		events.selectSQL: func() ([]string, [][]any) {
			return combinations([]func(*agentlab.EventFilter){
				func(f *agentlab.EventFilter) { f.Kinds = []string{"a"} },
				func(f *agentlab.EventFilter) { f.SandboxVMID = 7 },
				func(f *agentlab.EventFilter) { f.JobIDs = []string{"job-x"} },
				func(f *agentlab.EventFilter) { f.From = 7 },
				func(f *agentlab.EventFilter) { f.Tail = true },
				func(f *agentlab.EventFilter) { f.Limit = 10 },
			}, eventList)
		},
		egress.selectSQL: func() ([]string, [][]any) {
			return combinations([]func(*agentlab.EgressFilter){
				func(f *agentlab.EgressFilter) { f.VMID, f.UID = 7, "uid" },
				func(f *agentlab.EgressFilter) { f.JobID = "job-x" },
				func(f *agentlab.EgressFilter) { f.Denied = true },
				func(f *agentlab.EgressFilter) { f.Since = epoch.Add(time.Hour) },
				func(f *agentlab.EgressFilter) { f.Tail = true },
				func(f *agentlab.EgressFilter) { f.Limit = 10 },
			}, egressList)
		},
		snapshots.selectSQL: func() ([]string, [][]any) {
			return combinations([]func(*agentlab.SnapshotFilter){
				func(f *agentlab.SnapshotFilter) { f.SandboxUID = "uid" },
			}, snapshotList)
		},
		artifacts.selectSQL: func() ([]string, [][]any) { return []string{artifactList}, [][]any{{"job-x"}} },
		apiTokens.selectSQL: func() ([]string, [][]any) { return []string{tokenList}, [][]any{nil} },
	} {
		tails, args := list()
		for i, tail := range tails {
			check(name+tail, args[i])
		}
	}
}

// TestListSkipsDestroyed lists the first live sandboxes after many that are
// DESTROYED.
func TestListSkipsDestroyed(t *testing.T) {
	s := newStore(t)
	err := s.write(t.Context(), func(w *tx) error {
		for i := range 300 {
			sb := newSandbox(fmt.Sprintf("box-%d", i))
			sb.VMID, sb.CreatedAt, sb.UpdatedAt = 1000+i, epoch, epoch
			if i < 290 {
				sb.State = agentlab.SandboxDestroyed
			}
			if err := sandboxes.insert(w, &sb); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	tail, args := sandboxList(agentlab.SandboxFilter{Limit: 5, NoPooled: true})
	var plan string
	var id, parent, unused int
	if err := s.r.QueryRowContext(t.Context(), "EXPLAIN QUERY PLAN "+sandboxes.selectSQL+tail, args...).Scan(&id, &parent, &unused, &plan); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(plan, "sandboxes_live") {
		t.Errorf("the list reads destroyed sandboxes: %s", plan)
	}
	list := must(s.Sandboxes(t.Context(), agentlab.SandboxFilter{Limit: 5, NoPooled: true}))(t)
	if len(list) != 5 || list[0].VMID != 1290 {
		t.Errorf("%d sandboxes, the first %+v", len(list), list)
	}
}

// TestCountsUseIndexes checks that the counts of large tables read an index and not
// the rows.
func TestCountsUseIndexes(t *testing.T) {
	s := newStore(t)
	for _, query := range []string{
		"SELECT state, count(*) FROM sandboxes GROUP BY 1",
		"SELECT status, count(*) FROM jobs GROUP BY 1",
	} {
		var id, parent, unused int
		var plan string
		if err := s.r.QueryRowContext(t.Context(), "EXPLAIN QUERY PLAN "+query).Scan(&id, &parent, &unused, &plan); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(plan, "USING COVERING INDEX") {
			t.Errorf("%s: %s", query, plan)
		}
	}
}
