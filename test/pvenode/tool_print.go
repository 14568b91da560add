package pvenode

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The numbers and texts of an answer, however it was made.

func text(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return v
	case float64:
		return strconv.FormatFloat(v, 'g', 15, 64)
	}
	return fmt.Sprint(v)
}

func numeric(v any) float64 {
	f, _ := strconv.ParseFloat(text(v), 64)
	return f
}

// byText compares objects by the text of a key.
func byText(key string) func(a, b map[string]any) int {
	return func(a, b map[string]any) int { return strings.Compare(text(a[key]), text(b[key])) }
}

// records makes a list of objects of an answer.
func records(v any) []map[string]any {
	data, err := json.Marshal(v)
	if err != nil {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var out []map[string]any
	if dec.Decode(&out) != nil {
		return nil
	}
	return out
}

func record(v any) map[string]any {
	out := records([]any{v})
	if len(out) == 0 || out[0] == nil {
		return map[string]any{}
	}
	return out[0]
}

func printVMs(t *tool, r Response) {
	list := records(r.Data)
	if len(list) == 0 {
		return
	}
	slices.SortFunc(list, func(a, b map[string]any) int { return cmp.Compare(numeric(a["vmid"]), numeric(b["vmid"])) })
	t.printf("%10s %-20s %-10s %-10s %12s %-10s\n", "VMID", "NAME", "STATUS", "MEM(MB)", "BOOTDISK(GB)", "PID")
	for _, v := range list {
		pid := text(v["pid"])
		if pid == "" {
			pid = "0"
		}
		t.printf("%10s %-20s %-10s %-10s %12.2f %-10s\n", text(v["vmid"]), text(v["name"]), text(v["status"]),
			text(numeric(v["maxmem"])/(1<<20)), numeric(v["maxdisk"])/(1<<30), pid)
	}
}

func shown(key string, v any) string {
	if key == "description" {
		return encodeText(text(v))
	}
	return text(v)
}

func printConfig(t *tool, r Response) {
	c := record(r.Data)
	for _, k := range sortedKeys(c) {
		if k != "digest" {
			t.printf("%s: %s\n", k, shown(k, c[k]))
		}
	}
}

func printPending(t *tool, r Response) {
	list := records(r.Data)
	slices.SortFunc(list, byText("key"))
	for _, e := range list {
		k := text(e["key"])
		v, has := e["value"]
		p, pending := e["pending"]
		switch {
		case k == "digest":
		case has && numeric(e["delete"]) > 0:
			t.printf("del %s: %s\n", k, shown(k, v))
		case has:
			t.printf("cur %s: %s\n", k, shown(k, v))
			if pending {
				t.printf("new %s: %s\n", k, shown(k, p))
			}
		case pending:
			t.printf("new %s: %s\n", k, shown(k, p))
		}
	}
}

func printSnapshots(t *tool, r Response) {
	list := records(r.Data)
	children := map[string][]map[string]any{}
	names := map[string]bool{}
	for _, s := range list {
		names[text(s["name"])] = true
	}
	for _, s := range list {
		parent := text(s["parent"])
		if !names[parent] {
			parent = ""
		}
		children[parent] = append(children[parent], s)
	}
	var walk func(prefix, parent string)
	walk = func(prefix, parent string) {
		level := children[parent]
		slices.SortStableFunc(level, func(a, b map[string]any) int {
			switch {
			case a["snaptime"] == nil: // the current state
				return 1
			case b["snaptime"] == nil:
				return -1
			}
			return cmp.Compare(numeric(a["snaptime"]), numeric(b["snaptime"]))
		})
		for _, s := range level {
			description := text(s["description"])
			if description == "" {
				description = "no-description"
			}
			description, _, _ = strings.Cut(description, "\n")
			at := ""
			if s["snaptime"] != nil {
				at = time.Unix(int64(numeric(s["snaptime"])), 0).Format("2006-01-02 15:04:05")
			}
			t.printf("%s %-*s %-23s %s\n", prefix, max(30-len(prefix), 0), text(s["name"]), at, description)
			walk(" "+prefix, text(s["name"]))
		}
	}
	walk("`->", "")
}

func printText(t *tool, r Response) { t.printf("%s\n", text(r.Data)) }

func printAllocated(t *tool, r Response) { t.printf("successfully created '%s'\n", text(r.Data)) }

func printContent(t *tool, r Response) {
	list := records(r.Data)
	name, size := 0, 0.0
	for _, v := range list {
		name = max(name, len(text(v["volid"])))
		size = max(size, numeric(v["size"]))
	}
	digits := len(text(int64(size)))
	line := func(v, f, c, s string) string { return fmt.Sprintf("%-*s %-7s %-9s %*s", name, v, f, c, digits, s) }
	t.printf("%s VMID\n", line("Volid", "Format", "Type", "Size"))
	for _, v := range list {
		if numeric(v["vmid"]) != 0 {
			t.printf("%s %s\n", line(text(v["volid"]), text(v["format"]), text(v["content"]), text(v["size"])), text(v["vmid"]))
		}
	}
	slices.SortStableFunc(list, byText("format"))
	for _, v := range list {
		if numeric(v["vmid"]) == 0 {
			t.printf("%s\n", line(text(v["volid"]), text(v["format"]), text(v["content"]), text(v["size"])))
		}
	}
}

func printStorages(t *tool, r Response) {
	list := records(r.Data)
	name := 0
	for _, s := range list {
		name = max(name, len(text(s["storage"])))
	}
	name++
	unit := ""
	if t.n.v9() {
		unit = " (KiB)"
	}
	t.printf("%-*s %10s %10s %15s %15s %15s %8s\n", name, "Name", "Type", "Status", "Total"+unit, "Used"+unit, "Available"+unit, "%")
	slices.SortFunc(list, byText("storage"))
	for _, s := range list {
		status, per := "inactive", 0.0
		if numeric(s["active"]) > 0 {
			status = "active"
		}
		if numeric(s["total"]) > 0 {
			per = numeric(s["used"]) * 100 / numeric(s["total"])
		}
		percent := fmt.Sprintf("% 7.2f%%", per)
		if numeric(s["enabled"]) == 0 {
			status, percent = "disabled", "     N/A"
		}
		t.printf("%-*s %10s %10s %15d %15d %15d %s\n", name, text(s["storage"]), text(s["type"]), status,
			int64(numeric(s["total"]))/1024, int64(numeric(s["used"]))/1024, int64(numeric(s["avail"]))/1024, percent)
	}
}

// printAgent prints what the guest agent said.
func printAgent(t *tool, r Response) { t.printAgentResult(r.Data) }

func (t *tool) printAgentResult(data any) {
	if m, ok := data.(map[string]any); ok {
		if result, has := m["result"]; has {
			data = result
		}
	}
	switch v := data.(type) {
	case nil:
	case map[string]any:
		if len(v) > 0 {
			t.printf("%s", prettyJSON(v))
		}
	case string:
		if s := strings.TrimSuffix(v, "\n"); strings.TrimSpace(s) != "" {
			t.printf("%s\n", s)
		}
	case []any, []map[string]any:
		t.printf("%s", prettyJSON(v))
	default:
		t.printf("%s\n", text(v))
	}
}

// prettyJSON is JSON as Perl writes it for people.
func prettyJSON(v any) string {
	var b strings.Builder
	writePretty(&b, decoded(v), "")
	b.WriteByte('\n')
	return b.String()
}

// decoded is v as JSON would give it back.
func decoded(v any) any {
	data, err := json.Marshal(v)
	if err != nil {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var out any
	_ = dec.Decode(&out)
	return out
}

func writePretty(b *strings.Builder, v any, indent string) {
	in := indent + "   "
	switch v := v.(type) {
	case map[string]any:
		if len(v) == 0 {
			b.WriteString("{}")
			return
		}
		b.WriteString("{\n")
		for i, k := range sortedKeys(v) {
			b.WriteString(in + compactJSON(k) + " : ")
			writePretty(b, v[k], in)
			b.WriteString(comma(i, len(v)))
		}
		b.WriteString(indent + "}")
	case []any:
		if len(v) == 0 {
			b.WriteString("[]")
			return
		}
		b.WriteString("[\n")
		for i, e := range v {
			b.WriteString(in)
			writePretty(b, e, in)
			b.WriteString(comma(i, len(v)))
		}
		b.WriteString(indent + "]")
	default:
		b.WriteString(compactJSON(v))
	}
}

func comma(i, of int) string {
	if i+1 < of {
		return ",\n"
	}
	return "\n"
}

func compactJSON(v any) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if enc.Encode(v) != nil {
		return "null"
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// printData prints a result in a format that was asked for. Tables are not
// made: who parses them reads what is meant for people.
func (t *tool) printData(v any, f formats) {
	switch v.(type) {
	case nil:
		return
	case string, int, int64, float64, json.Number:
		if f.output == "" || f.output == "text" {
			t.printf("%s\n", text(v))
			return
		}
	}
	switch f.output {
	case "json":
		t.printf("%s\n", compactJSON(decoded(v)))
	case "json-pretty":
		t.printf("%s", prettyJSON(v))
	default:
		t.printTable(v)
	}
}

// printTable prints keys and values, one to a line; the real tools draw a
// table of them.
func (t *tool) printTable(v any) {
	rows := records(v)
	if rows == nil {
		rows = []map[string]any{record(v)}
	}
	for _, r := range rows {
		keys := sortedKeys(r)
		slices.Sort(keys)
		for _, k := range keys {
			t.printf("%s %s\n", k, text(r[k]))
		}
	}
}
