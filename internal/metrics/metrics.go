// Package metrics has the metrics of the daemon in the text format of
// Prometheus.
//
// The services do not know metrics. Counters and histograms are made of what the
// store commits (events.go), gauges are read when they are requested (gauges.go).
// Both are tables: a new metric is one entry. docs/metrics.md is generated from
// them.
//
// Each label has a fixed list of values, so the number of series does not depend
// on what users or guests do. The names of backends are those of the configuration.
// Other names, ids, addresses and texts are never values.
package metrics

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/common/expfmt"

	"github.com/agentlab-vm/agentlab"
)

// ContentType is the media type of the text.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// readLimit is how long reading all gauges may take.
const readLimit = 10 * time.Second

// metric describes one metric.
type metric struct {
	name, help string
	label      string    // "" means none
	values     []string  // all values of the label
	buckets    []float64 // upper bounds; nil means no histogram
}

// Config is the configuration of a Set.
type Config struct {
	Sources Sources
	Version string       // of the daemon
	Backend string       // name of its backend
	Logger  *slog.Logger // nil means none
}

// Set has the metrics of one daemon. Committed and Written may be called at any
// time, Text after Start.
type Set struct {
	cfg    Config
	events []*recorder          // of eventMetrics, in the same order
	direct map[string]*recorder // of directMetrics and the metrics of backends, by name

	backends []string // names

	mu  sync.Mutex // one scrape at a time: further ones wait
	reg *prometheus.Registry
}

// New returns a Set that counts from now on.
func New() *Set {
	s := &Set{reg: prometheus.NewRegistry(), direct: map[string]*recorder{}, cfg: Config{Logger: slog.New(slog.DiscardHandler)}}
	for _, m := range eventMetrics {
		s.events = append(s.events, s.record(m.metric))
	}
	for _, m := range directMetrics {
		s.direct[m.name] = s.record(m)
	}
	s.reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return s
}

// Backends adds the metrics of the backends with these names. It must be called once,
// before BackendCalled and Start.
func (s *Set) Backends(names []string) {
	for _, m := range []metric{backendCall, backendFailures} {
		m.values = names
		s.direct[m.name] = s.record(m)
	}
	s.backends = names
}

// Start adds the gauges. It must be called once.
func (s *Set) Start(cfg Config) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s.cfg = cfg
	build := prometheus.NewGauge(prometheus.GaugeOpts{Name: buildInfo.name, Help: buildInfo.help,
		ConstLabels: prometheus.Labels{"version": cfg.Version, "backend": cfg.Backend}})
	build.Set(1)
	s.reg.MustRegister(build)
}

// recorder counts or observes one metric. The series of all its values exist from
// the beginning, so that rates are right.
type recorder struct {
	counters   map[string]prometheus.Counter
	histograms map[string]prometheus.Observer
}

func (s *Set) record(m metric) *recorder {
	r := &recorder{counters: map[string]prometheus.Counter{}, histograms: map[string]prometheus.Observer{}}
	var labels []string
	if m.label != "" {
		labels = []string{m.label}
	}
	if m.buckets != nil {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: m.name, Help: m.help, Buckets: m.buckets}, labels)
		s.reg.MustRegister(v)
		for _, value := range m.series() {
			r.histograms[value] = v.WithLabelValues(with(m, value)...)
		}
		return r
	}
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.name, Help: m.help}, labels)
	s.reg.MustRegister(v)
	for _, value := range m.series() {
		r.counters[value] = v.WithLabelValues(with(m, value)...)
	}
	return r
}

// series returns the values of the label; "" if there is no label.
func (m metric) series() []string {
	if m.label == "" {
		return []string{""}
	}
	return m.values
}

func with(m metric, value string) []string {
	if m.label == "" {
		return nil
	}
	return []string{value}
}

// add adds n to the series, or observes n. A value that the metric does not have,
// and a number that is negative, are not counted.
func (r *recorder) add(value string, n float64) {
	if n < 0 {
		return
	}
	if c := r.counters[value]; c != nil {
		c.Add(n)
	}
	if h := r.histograms[value]; h != nil {
		h.Observe(n)
	}
}

// Committed counts what a transaction changed. It is quick and never blocks.
func (s *Set) Committed(c agentlab.Commit) {
	s.countEvents(c.Events)
	s.add(egressDecisions, "allow", float64(c.Egress.Allowed))
	s.add(egressDecisions, "deny", float64(c.Egress.Denied))
	s.add(egressDecisions, "unrecorded", float64(c.Egress.Dropped))
	for _, scope := range c.Messages {
		s.add(messagesPosted, string(scope), 1)
	}
}

// Written observes one write to the database: how long it waited for its turn, and
// how long it took.
func (s *Set) Written(wait, took time.Duration, err error) {
	s.add(storeWait, "", wait.Seconds())
	s.called(storeWrite, storeFailures, took, err)
}

// Read observes how long one read of the database took.
func (s *Set) Read(took time.Duration) { s.add(storeRead, "", took.Seconds()) }

// Checked observes one comparison of workspaces with the backend.
func (s *Set) Checked(took time.Duration, err error) {
	s.called(workspaceCheck, workspaceCheckFailures, took, err)
}

// BackendCalled observes one call of a backend.
func (s *Set) BackendCalled(name string, took time.Duration, err error) {
	s.add(backendCall, name, took.Seconds())
	switch agentlab.CodeOf(err) {
	case agentlab.CodeUnavailable, agentlab.CodeUnknownOutcome, agentlab.CodeTimeout, agentlab.CodeInternal:
		s.add(backendFailures, name, 1)
	}
}

// BundleMade observes one doctor bundle of that size in bytes.
func (s *Set) BundleMade(size int, took time.Duration, err error) {
	s.called(bundleTime, bundleFailures, took, err)
	s.add(bundleBytes, "", float64(size))
}

// CacheRequest counts one request to the registry cache by its result.
func (s *Set) CacheRequest(result string) { s.add(cacheRequests, result, 1) }

// CacheBytes counts bytes that the registry cache has sent to sandboxes, or received
// from upstreams.
func (s *Set) CacheBytes(received bool, n int64) {
	direction := "sent"
	if received {
		direction = "received"
	}
	s.add(cacheBytes, direction, float64(n))
}

// called observes how long a call took, and counts its error by code.
func (s *Set) called(seconds, failures metric, took time.Duration, err error) {
	s.add(seconds, "", took.Seconds())
	if err != nil {
		s.add(failures, string(agentlab.CodeOf(err)), 1)
	}
}

// add is recorder.add for one of directMetrics.
func (s *Set) add(m metric, value string, n float64) { s.direct[m.name].add(value, n) }

// Text returns all metrics. If some cannot be read, it leaves them out and counts
// a failure.
func (s *Set) Text(ctx context.Context) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	gauges := prometheus.NewRegistry()
	for _, g := range gaugeMetrics {
		if g.label == backendLabel {
			g.values = s.backends
		}
		values, err := g.read(ctx, s.cfg.Sources)
		if err != nil {
			s.add(readFailures, "", 1)
			s.cfg.Logger.Warn("a metric could not be read", "metric", g.name, "err", err)
			continue
		}
		gauges.MustRegister(g.set(values))
	}
	families, err := prometheus.Gatherers{s.reg, gauges}.Gather()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	enc := expfmt.NewEncoder(&b, expfmt.NewFormat(expfmt.TypeTextPlain))
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

// set returns a collector with the values that were read. Those that the metric
// does not have are left out; those that were not read are 0.
func (g gaugeMetric) set(values map[string]float64) prometheus.Collector {
	var labels []string
	if g.label != "" {
		labels = []string{g.label}
	}
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: g.name, Help: g.help}, labels)
	for _, value := range g.series() {
		v.WithLabelValues(with(g.metric, value)...).Set(values[value])
	}
	return v
}
