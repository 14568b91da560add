package metrics

import (
	"fmt"
	"slices"
	"strings"
)

// all returns all metrics of AgentLab with their types.
func all() (list []metric, types map[string]string) {
	types = map[string]string{}
	add := func(m metric, kind string) {
		if m.buckets != nil {
			kind = "histogram"
		}
		list = append(list, m)
		types[m.name] = kind
	}
	for _, m := range gaugeMetrics {
		add(m.metric, "gauge")
	}
	for _, m := range eventMetrics {
		add(m.metric, "counter")
	}
	for _, m := range directMetrics {
		add(m, "counter")
	}
	add(buildInfo, "gauge")
	add(backendCall, "counter")
	add(backendFailures, "counter")
	slices.SortFunc(list, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return list, types
}

// Reference returns the table of all metrics in Markdown.
func Reference() string {
	var b strings.Builder
	b.WriteString("| Metric | Type | Labels | |\n|---|---|---|---|\n")
	list, types := all()
	for _, m := range list {
		labels := ""
		switch {
		case len(m.values) > 0:
			labels = "`" + m.label + "`: " + strings.Join(m.values, ", ")
		case m.label != "":
			labels = "`" + strings.ReplaceAll(m.label, ", ", "`, `") + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.name, types[m.name], labels, m.help)
	}
	return b.String()
}
