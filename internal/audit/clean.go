package audit

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Maximum lengths of text, in bytes. A name of DNS has at most 253 characters,
// and up to four times as many bytes when each is escaped.
const (
	maxName  = 1012
	maxRule  = 300
	maxError = 200
)

// clean sanitises a record before it is stored: its text comes from a guest.
// The result contains no terminal control characters, line breaks or column
// separators; a name has the format of DNS tools.
func clean(r agentlab.EgressRecord, vmid int, now time.Time) agentlab.EgressRecord {
	r.VMID = vmid
	r.Name = escape(r.Name, maxName)
	r.Rule = escape(r.Rule, maxRule)
	if r.Rule == "" || r.Rule == agentlab.RuleAuditLimit {
		r.Rule = "unknown"
	}
	r.Error = agentlab.OneLine(r.Error, maxError)
	if a, err := netip.ParseAddr(r.Addr); err == nil {
		r.Addr = a.WithZone("").String()
	} else {
		r.Addr = ""
	}
	if !validProto(r.Proto) {
		r.Proto = "unknown"
	}
	if r.Port < 0 || r.Port > 65535 {
		r.Port = 0
	}
	r.Count, r.Dropped = max(r.Count, 1), max(r.Dropped, 0)
	r.Time, r.Last = sane(r.Time, now), sane(r.Last, now)
	if r.Last.Before(r.Time) {
		r.Last = r.Time
	}
	return r
}

// sane returns t, or now if t is not a plausible time.
func sane(t, now time.Time) time.Time {
	if t.Year() < 2020 || t.After(now.Add(time.Hour)) {
		return now.UTC()
	}
	return t.UTC()
}

// escape writes every byte that is not a graphic ASCII character as \DDD, like
// DNS, and cuts the text at limit.
func escape(s string, limit int) string {
	plain := true
	for i := range len(s) {
		plain = plain && s[i] > ' ' && s[i] < 0x7f
	}
	if plain && len(s) <= limit {
		return s
	}
	var b strings.Builder
	for i := range len(s) {
		part := s[i : i+1]
		if c := s[i]; c <= ' ' || c >= 0x7f {
			part = fmt.Sprintf(`\%03d`, c)
		}
		if b.Len()+len(part) > limit-3 {
			b.WriteString("...")
			break
		}
		b.WriteString(part)
	}
	return b.String()
}

func validProto(p string) bool {
	if p == "" || len(p) > 16 {
		return false
	}
	for _, c := range []byte(p) {
		if c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}
