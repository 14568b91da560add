package hostos

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
)

var errStat = errors.New("/proc/PID/stat is not as expected")

// ProcStat returns the fields of /proc/PID/stat of Linux from the third one on.
func ProcStat(pid int) ([]string, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return nil, err
	}
	return parseStat(b)
}

// parseStat skips the second field, which is in brackets and may contain any text,
// including brackets.
func parseStat(stat []byte) ([]string, error) {
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 {
		return nil, errStat
	}
	return strings.Fields(string(stat[i+1:])), nil
}

// ProcStart returns when a process started, in clock ticks since boot.
func ProcStart(pid int) (uint64, error) {
	fields, err := ProcStat(pid)
	if err != nil {
		return 0, err
	}
	return parseStart(fields)
}

func parseStart(fields []string) (uint64, error) {
	if len(fields) < 20 {
		return 0, errStat
	}
	return strconv.ParseUint(fields[19], 10, 64) // field 22
}
