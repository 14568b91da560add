package pvenode_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"sort"
	"strings"
)

// drawn are the values that differ between any two runs. They are replaced by
// their name before two answers are compared.
var drawn = []struct {
	re   *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`UPID:([a-z]+):[0-9A-F]{8}:[0-9A-F]{8,9}:[0-9A-F]{8}:`), "UPID:$1:PID:PSTART:TIME:"},
	{regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`), "UUID"},
	{regexp.MustCompile(`(?i)BC:24:11:([1-9A-F][0-9A-F]|0[1-9A-F])(:[0-9A-F]{2}){2}`), "MAC"},
	{regexp.MustCompile(`(?i)BC:24:11:00:([1-9A-F][0-9A-F]|0[1-9A-F]):[0-9A-F]{2}`), "MAC"},
	{regexp.MustCompile(`creation-qemu=[0-9.]+,ctime=\d+`), "creation-qemu=VERSION,ctime=TIME"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d`), "DATE"},
	{regexp.MustCompile(`(running    +\d+ +[0-9.]+) \d+ *$`), "$1 PID"},
	{regexp.MustCompile(`([0-9A-F]{2}:){31}[0-9A-F]{2}`), "FINGERPRINT"},
	{regexp.MustCompile(`at (/usr/share/perl5/\S+) line \d+\.`), "at $1 line N."},
	{regexp.MustCompile(`"((?:tx|rx)-(?:bytes|packets|dropped|errs))" : \d+`), `"$1" : 0`},
}

// drawnKeys are members of JSON objects whose numbers differ in each run.
var drawnKeys = map[string]bool{
	"pid": true, "pstart": true, "starttime": true, "endtime": true, "ctime": true, "snaptime": true,
	"uptime": true, "mem": true, "netin": true, "netout": true, "cpu": true, "digest": true,
	"notbefore": true, "notafter": true, "pem": true, "instance-id": true,
	"rx-bytes": true, "rx-packets": true, "tx-bytes": true, "tx-packets": true,
}

func normalize(s string) string {
	for _, d := range drawn {
		s = d.re.ReplaceAllString(s, d.with)
	}
	return s
}

func normalizeLines(lines []string) []string {
	out := make([]string, 0, len(lines))
	for _, l := range lines {
		out = append(out, normalize(normalizeJSONLine(l)))
	}
	return out
}

// normalizeJSONLine normalizes a line that is JSON, as pvesh prints it.
func normalizeJSONLine(s string) string {
	if !strings.HasPrefix(s, "{") && !strings.HasPrefix(s, "[{") {
		return s
	}
	if out, err := normalizeJSON(s); err == nil {
		return out
	}
	return s
}

// normalizeJSON sorts keys, and lists whose order Proxmox leaves to chance:
// those of hashes.
func normalizeJSON(s string) (string, error) {
	dec := json.NewDecoder(strings.NewReader(s))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return "", err
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(walkJSON(v)); err != nil {
		return "", err
	}
	return normalize(strings.TrimSpace(b.String())), nil
}

func walkJSON(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, m := range v {
			if k == "key" && m == "digest" {
				v["value"] = "DRAWN"
			}
			if _, object := m.(map[string]any); drawnKeys[k] && !object && m != nil {
				v[k] = "DRAWN"
				continue
			}
			if s, ok := m.(string); ok && k == "content" && strings.Contains(s, ",") {
				kinds := strings.Split(s, ",") // of a hash
				slices.Sort(kinds)
				v[k] = strings.Join(kinds, ",")
				continue
			}
			v[k] = walkJSON(m)
		}
		return v
	case []any:
		for i := range v {
			v[i] = walkJSON(v[i])
		}
		if unordered(v) {
			sort.SliceStable(v, func(i, j int) bool { return fmt.Sprint(v[i]) < fmt.Sprint(v[j]) })
		}
		return v
	}
	return v
}

// unordered reports whether a list is made from a hash on the node: VMs,
// snapshots, settings, members of a pool, network interfaces, commands of the agent.
func unordered(list []any) bool {
	for _, e := range list {
		m, ok := e.(map[string]any)
		if !ok {
			return false
		}
		_, vm := m["netin"]
		_, resource := m["node"]
		_, setting := m["key"]
		_, ability := m["success-response"]
		_, snapshot := m["snaptime"]
		snapshot = snapshot || m["name"] == "current"
		if _, task := m["upid"]; task || (!vm && !resource && !setting && !ability && !snapshot) {
			return false
		}
	}
	return len(list) > 0
}

// difference tells where two answers differ; "" when they do not.
func difference(what string, want, got []string) string {
	if slices.Equal(want, got) {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s:\n", what)
	for i := range max(len(want), len(got)) {
		w, g := "(no line)", "(no line)"
		if i < len(want) {
			w = want[i]
		}
		if i < len(got) {
			g = got[i]
		}
		if w != g {
			fmt.Fprintf(&b, "  recorded  %s\n  fake node %s\n", w, g)
		}
	}
	return b.String()
}
