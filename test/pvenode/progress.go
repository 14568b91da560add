package pvenode

import (
	"fmt"
	"strconv"
)

// progress returns the log lines of a copy of a volume of that size: a step is
// a multiple of 2 MiB of at least one percent, and a line has the rounded
// percentage and its bytes.
func progress(size int64) []string {
	if size <= 0 {
		return nil
	}
	const unit = 2 << 20
	step := max((size/100+unit-1)/unit*unit, unit)
	var out []string
	for at := int64(0); at < size; at += step {
		out = append(out, progressLine(size, float64(at)*100/float64(size)))
	}
	last := progressLine(size, 100)
	return append(out, last, last)
}

func progressLine(size int64, pct float64) string {
	text := strconv.FormatFloat(pct, 'f', 2, 64)
	rounded, _ := strconv.ParseFloat(text, 64)
	return fmt.Sprintf("transferred %s of %s (%s%%)", humanSize(float64(size)*rounded/100), humanSize(float64(size)), text)
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
