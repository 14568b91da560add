package pvetest

import "fmt"

// progress is what copying a volume of a size writes to the log.
func progress(size int64) []string {
	if size <= 0 {
		return nil
	}
	step := 1.0
	for float64(size)*step/100 < 2<<20 {
		step += 0.01
	}
	var out []string
	for pct := 0.0; pct < 100; pct += step {
		out = append(out, progressLine(size, pct))
	}
	last := progressLine(size, 100)
	return append(out, last, last)
}

func progressLine(size int64, pct float64) string {
	return fmt.Sprintf("transferred %s of %s (%.2f%%)", humanSize(float64(size)*pct/100), humanSize(float64(size)), pct)
}

// humanSize writes a size with one decimal, as logs have it.
func humanSize(b float64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	i := 0
	for b >= 1024 && i < len(units)-1 {
		b /= 1024
		i++
	}
	return fmt.Sprintf("%.1f %s", b, units[i])
}
