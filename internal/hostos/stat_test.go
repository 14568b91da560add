package hostos

import "testing"

func TestProcStart(t *testing.T) {
	start := func(stat string) (uint64, error) {
		fields, err := parseStat([]byte(stat))
		if err != nil {
			return 0, err
		}
		return parseStart(fields)
	}
	for stat, want := range map[string]uint64{
		"7 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21":         4711,
		"7 (a) (b) R S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21":   18, // not what a kernel writes; no crash
		"7 (evil) 1 2) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21": 4711,
	} {
		if got, err := start(stat); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", stat, got, err, want)
		}
	}
	for _, bad := range []string{"", "7 (x S 1", "7 (x) S 1 2", "7 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x 20"} {
		if _, err := start(bad); err == nil {
			t.Errorf("%q has a start time", bad)
		}
	}
}
