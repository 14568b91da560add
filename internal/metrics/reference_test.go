package metrics

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

var update = flag.Bool("update", false, "write the generated part of docs/metrics.md")

const (
	document  = "../../docs/metrics.md"
	dashboard = "../../docs/grafana-dashboard.json"
	alerts    = "../../docs/alerts.yml"
	begin     = "<!-- metrics: go test ./internal/metrics -run TestReference -update -->\n"
	end       = "<!-- end of metrics -->"
)

// The table in docs/metrics.md is generated from the tables of this package.
func TestReference(t *testing.T) {
	text := read(t, document)
	before, rest, ok := strings.Cut(text, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has lost its marks %q and %q", document, begin, end)
	}
	want := before + begin + Reference() + end + after
	if *update {
		if err := os.WriteFile(document, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if text != want {
		t.Errorf("%s is out of date: go test ./internal/metrics -run TestReference -update", document)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// All metrics that are exported are in the reference, with their type, their label
// and all its values, and the other way round.
func TestExportedIsDocumented(t *testing.T) {
	list, types := all()
	s := newSet(t, &counts{})
	exported := scrape(t, s)
	for name, f := range exported {
		if !strings.HasPrefix(name, "agentlab_") {
			if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
				t.Errorf("%s has no prefix of the reference", name)
			}
			continue
		}
		i := slices.IndexFunc(list, func(m metric) bool { return m.name == name })
		if i < 0 {
			t.Errorf("%s is exported and not in the reference", name)
			continue
		}
		if have := strings.ToLower(f.GetType().String()); have != types[name] || f.GetHelp() != list[i].help {
			t.Errorf("%s is a %s with the help %q", name, have, f.GetHelp())
		}
		values := list[i].values
		if list[i].label == backendLabel {
			values = s.backends
		}
		if len(f.GetMetric()) != max(1, len(values)) {
			t.Errorf("%s has %d series", name, len(f.GetMetric()))
		}
	}
	for _, m := range list {
		if exported[m.name] == nil {
			t.Errorf("%s is in the reference and not exported", m.name)
		}
		unit := regexp.MustCompile(`_(total|seconds|bytes)$`)
		if types[m.name] == "counter" && !strings.HasSuffix(m.name, "_total") || types[m.name] == "histogram" && !unit.MatchString(m.name) || types[m.name] == "gauge" && strings.HasSuffix(m.name, "_total") {
			t.Errorf("%s: a %s needs another suffix", m.name, types[m.name])
		}
		if !strings.HasSuffix(m.help, ".") {
			t.Errorf("%s: the help is not a sentence", m.name)
		}
	}
}

var usedMetric = regexp.MustCompile(`\b((?:agentlab|process|go)_[a-z0-9_]+)(?:\{([^}]*)\})?`)

// checkExpressions checks that the expressions use only metrics, labels and values
// that are exported.
func checkExpressions(t *testing.T, where string, expressions []string) {
	t.Helper()
	exported := scrape(t, newSet(t, &counts{}))
	list, types := all()
	for _, e := range expressions {
		found := usedMetric.FindAllStringSubmatch(e, -1)
		if len(found) == 0 {
			t.Errorf("%s: %q uses no metric", where, e)
		}
		for _, f := range found {
			name := f[1]
			if base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, ""); types[base] == "histogram" {
				name = base
			} else if types[name] == "histogram" {
				t.Errorf("%s: %q uses a histogram without _bucket, _sum or _count", where, e)
			}
			if exported[name] == nil {
				t.Errorf("%s: %q uses %s, which is not exported", where, e, f[1])
				continue
			}
			i := slices.IndexFunc(list, func(m metric) bool { return m.name == name })
			for label := range strings.SplitSeq(f[2], ",") {
				if label == "" {
					continue
				}
				m := regexp.MustCompile(`^\s*([a-z]+)\s*(=~|=|!=|!~)\s*"(.*)"$`).FindStringSubmatch(label)
				if m == nil || i < 0 || m[1] != list[i].label {
					t.Errorf("%s: %q: %s has no label as in %s", where, e, name, label)
					continue
				}
				for value := range strings.SplitSeq(m[3], "|") {
					if !slices.Contains(list[i].values, value) {
						t.Errorf("%s: %q: %s has no value %q", where, e, name, value)
					}
				}
			}
		}
	}
}

// The dashboard is valid JSON and uses only metrics that exist.
func TestDashboard(t *testing.T) {
	var d struct {
		UID, Title string
		Panels     []struct {
			ID      int
			Title   string
			Type    string
			GridPos struct{ H, W, X, Y int }
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, dashboard)), &d); err != nil {
		t.Fatal(err)
	}
	if d.UID == "" || d.Title == "" || len(d.Panels) < 8 {
		t.Fatalf("%+v", d)
	}
	ids := map[int]bool{}
	for _, p := range d.Panels {
		if ids[p.ID] || p.Title == "" || p.Type == "" || p.GridPos.W == 0 || p.GridPos.X+p.GridPos.W > 24 || len(p.Targets) == 0 {
			t.Errorf("panel %+v", p)
		}
		ids[p.ID] = true
		var expressions []string
		for _, target := range p.Targets {
			expressions = append(expressions, target.Expr)
		}
		checkExpressions(t, p.Title, expressions)
	}
}

// The alert rules are valid and use only metrics that exist.
func TestAlerts(t *testing.T) {
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.UnmarshalWithOptions([]byte(read(t, alerts)), &file, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			n++
			if _, err := model.ParseDuration(r.For); err != nil || r.Alert == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("rule %+v: %v", r, err)
			}
			if strings.Contains(r.Expr, "up{") { // of Prometheus itself
				continue
			}
			checkExpressions(t, r.Alert, []string{r.Expr})
		}
	}
	if n < 5 {
		t.Errorf("%d rules", n)
	}
}

// promtool, if it is installed, accepts the rules, the expressions of the dashboard
// and the text.
func TestPromtool(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed; TestAlerts and TestExportedIsDocumented check the same without it")
	}
	run := func(stdin []byte, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), promtool, args...)
		cmd.Stdin = bytes.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
	text, err := newSet(t, &counts{}).Text(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	run(text, "check", "metrics")
	run(nil, "check", "rules", alerts)
	var d struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	if err := json.Unmarshal([]byte(read(t, dashboard)), &d); err != nil {
		t.Fatal(err)
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	n := 0
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			n++
			fmt.Fprintf(&rules, "  - record: panel:%d\n    expr: '%s'\n", n, strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"))
		}
	}
	path := t.TempDir() + "/dashboard.yml"
	if err := os.WriteFile(path, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	run(nil, "check", "rules", path)
}

// scrape returns the metrics that a Prometheus server reads.
func scrape(t *testing.T, s *Set) families {
	t.Helper()
	text, err := s.Text(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	f, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return f
}
