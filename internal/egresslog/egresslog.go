// Package egresslog keeps the record of what one sandbox wanted from the
// network, in a file that is bounded whatever the sandbox does.
package egresslog

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

const (
	// seqJump is added to the numbers of records after the host was booted
	// again: the disk may not have what was last written to it, and no number
	// may be given twice.
	seqJump = 10000
	// maxLine bounds a line that is taken for a record, in bytes.
	maxLine = 64 << 10
	// MaxRecords bounds one answer of Read.
	MaxRecords = 10000
	// maxText bounds a name or an error that is written down, in bytes.
	maxText = 1024

	maxBytes, bytesPerSecond = 8 << 20, 64 << 10
)

// Log is a sandbox's audit records: JSON lines that begin with their
// number, in a bounded log.
type Log struct {
	log *bounded.Log

	mu  sync.Mutex
	seq int64 // of the last record
}

// Open opens or makes the log at path and goes on where it ends. rebooted says
// that the host was since it was written.
func Open(path string, rebooted bool) (*Log, error) {
	last, whole, err := lastSeq(path)
	if err != nil {
		return nil, err
	}
	if rebooted && last > 0 {
		last += seqJump
	}
	log, err := bounded.OpenLog(path, maxBytes, bytesPerSecond, time.Now)
	if err != nil {
		return nil, err
	}
	if !whole {
		_, _ = log.Write([]byte("\n")) // so that half a line does not spoil the next one
	}
	return &Log{log: log, seq: last}, nil
}

// Write gives a record its number and appends it.
func (l *Log) Write(r agentlab.EgressRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Seq = l.seq + 1
	r.Name, r.Error = agentlab.OneLine(r.Name, maxText), agentlab.OneLine(r.Error, maxText)
	line, err := json.Marshal(r)
	if err != nil {
		return
	}
	l.seq++ // also for one that the log drops: the gap tells of it
	_, _ = l.log.Write(append(line, '\n'))
}

// Close closes the file.
func (l *Log) Close() error { return l.log.Close() }

// halves opens the halves of a log, the older first; either may be
// missing. A change of halves in between is noticed.
func halves(path string) (files []*os.File, err error) {
	open := func(name string) (*os.File, error) {
		f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return f, err
	}
	for {
		newer, err := open(path)
		if err != nil {
			return nil, err
		}
		older, err := open(path + bounded.OldSuffix)
		if err != nil {
			closeAll(newer)
			return nil, err
		}
		if newer != nil && older != nil {
			a, errA := newer.Stat()
			b, errB := older.Stat()
			if err := errors.Join(errA, errB); err != nil {
				closeAll(older, newer)
				return nil, err
			}
			if os.SameFile(a, b) {
				closeAll(older, newer)
				continue
			}
		}
		for _, f := range []*os.File{older, newer} {
			if f != nil {
				files = append(files, f)
			}
		}
		return files, nil
	}
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// lastSeq finds the number of the last record, and whether the log ends with
// a whole line.
func lastSeq(path string) (last int64, whole bool, err error) {
	files, err := halves(path)
	if err != nil {
		return 0, false, err
	}
	defer closeAll(files...)
	whole = true
	for _, f := range files {
		err := eachLine(f, func(line []byte, ended bool) bool {
			whole = ended
			if seq := seqOf(line); seq > last {
				last = seq
			}
			return true
		})
		if err != nil {
			return 0, false, err
		}
	}
	return last, whole, nil
}

// eachLine calls f with every line that is not too long, until f says false.
// ended tells that the line has an end.
func eachLine(r io.Reader, f func(line []byte, ended bool) bool) error {
	br := bufio.NewReaderSize(r, maxLine)
	long := false
	for {
		line, err := br.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			long = true
			continue
		case err != nil && !errors.Is(err, io.EOF):
			return err
		}
		ended := err == nil
		if long {
			line = nil
		}
		if (len(line) > 0 || long) && !f(line, ended) {
			return nil
		}
		if !ended {
			return nil
		}
		long = false
	}
}

// seqOf reads the number that a record's line begins with; 0 for any other.
func seqOf(line []byte) int64 {
	rest, ok := bytes.CutPrefix(line, []byte(`{"seq":`))
	if !ok {
		return 0
	}
	digits, _, ok := bytes.Cut(rest, []byte(","))
	if !ok {
		return 0
	}
	n, err := strconv.ParseInt(string(digits), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// Read returns the records of the log at path whose number is above after,
// oldest first, at most limit of them. It does not wait, and needs no open Log.
// A log that is not there has none.
func Read(ctx context.Context, path string, after int64, limit int) ([]agentlab.EgressRecord, error) {
	if limit < 1 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d is not above 0", limit).WithField("limit")
	}
	limit = min(limit, MaxRecords)
	files, err := halves(path)
	if err != nil {
		return nil, unreadable(err)
	}
	defer closeAll(files...)
	var out []agentlab.EgressRecord
	for _, f := range files {
		err := eachLine(f, func(line []byte, ended bool) bool {
			seq := seqOf(line)
			if !ended || seq <= after {
				return ctx.Err() == nil
			}
			var r agentlab.EgressRecord
			if json.Unmarshal(line, &r) == nil && r.Seq == seq {
				out = append(out, r)
				after = seq // never backwards
			}
			return len(out) < limit && ctx.Err() == nil
		})
		if err != nil {
			return nil, unreadable(err)
		}
		if len(out) >= limit {
			break
		}
	}
	if ctx.Err() != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "reading an egress log: %w", context.Cause(ctx))
	}
	return out, nil
}

func unreadable(err error) error {
	return agentlab.Errorf(agentlab.CodeInternal, "cannot read an egress log: %w", err)
}
