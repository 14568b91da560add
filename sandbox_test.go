package agentlab

import (
	"testing"
	"time"
)

func TestFormatTTL(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 30 * time.Second: "30s", time.Minute: "1m", 10 * time.Minute: "10m", 90 * time.Minute: "1h30m", 10 * time.Hour: "10h",
		24 * time.Hour: "1d", 36 * time.Hour: "36h", MaxTTL: "30d", time.Hour + time.Second: "1h0m1s",
	} {
		if got := FormatTTL(d); got != want {
			t.Errorf("FormatTTL(%s) = %q, want %q", d, got, want)
		}
	}
}

func TestCheckTTL(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "ttl: 0s is shorter than the minimum of 1m", 30 * time.Second: "ttl: 30s is shorter than the minimum of 1m",
		MaxTTL + time.Minute: "ttl: 720h1m is longer than the maximum of 30d", MinTTL: "", MaxTTL: "",
	} {
		if err := ValidateTTL(d); (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("ValidateTTL(%s) = %v, want %q", d, err, want)
		}
	}
}

func TestPlural(t *testing.T) {
	for n, want := range map[int]string{0: "0 jobs, 0 sandboxes, 0 entries", 1: "1 job, 1 sandbox, 1 entry", 2: "2 jobs, 2 sandboxes, 2 entries"} {
		if got := Plural(n, "job") + ", " + Plural(n, "sandbox") + ", " + Plural(n, "entry"); got != want {
			t.Errorf("Plural(%d) = %q, want %q", n, got, want)
		}
	}
}
