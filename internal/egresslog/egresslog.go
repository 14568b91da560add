// Package egresslog stores the egress decisions about one sandbox in a file of
// limited size.
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
	// seqJump is added to the sequence numbers of records after a reboot of
	// the host: the last records may not be on the disk, and no number may be
	// reused.
	seqJump = 10000
	// maxLine is the maximum length of a record's line, in bytes.
	maxLine = 64 << 10
	// MaxRecords is the maximum number of records of one Read.
	MaxRecords = 10000
	// maxText is the maximum length of a stored name or error, in bytes.
	maxText = 1024

	maxBytes, bytesPerSecond = 8 << 20, 64 << 10
)

// Log has a sandbox's audit records: JSON lines that begin with their sequence
// number, in a bounded log.
type Log struct {
	log  *bounded.Log
	vmid int

	mu  sync.Mutex
	seq int64 // of the last record
}

// Open opens or creates the log of the sandbox vmid at path for appending.
// rebooted means that the host was rebooted after the last write.
func Open(path string, vmid int, rebooted bool) (*Log, error) {
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
		_, _ = log.Write([]byte("\n")) // so that an incomplete line does not damage the next one
	}
	return &Log{log: log, vmid: vmid, seq: last}, nil
}

// Write assigns a record its sequence number and the sandbox's VMID, without
// which older daemons ignore it, and appends it.
func (l *Log) Write(r agentlab.EgressRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Seq, r.VMID = l.seq+1, l.vmid
	r.Name, r.Error = agentlab.OneLine(r.Name, maxText), agentlab.OneLine(r.Error, maxText)
	line, err := json.Marshal(r)
	if err != nil {
		return
	}
	l.seq++ // also for a dropped record, which then is a gap
	_, _ = l.log.Write(append(line, '\n'))
}

// Close closes the file.
func (l *Log) Close() error { return l.log.Close() }

// openFiles opens the halves of a log, the older first; either may be missing. It
// detects a rotation in between.
func openFiles(path string) (files []*os.File, err error) {
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

// lastSeq returns the sequence number of the last record, and whether the log
// ends with a complete line.
func lastSeq(path string) (last int64, whole bool, err error) {
	files, err := openFiles(path)
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

// eachLine calls f with every line that is not too long, until f returns
// false. ended means that the line is complete.
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

// seqOf returns the sequence number at the beginning of a record's line, 0 for
// any other line.
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
// A missing log has no records.
func Read(ctx context.Context, path string, after int64, limit int) ([]agentlab.EgressRecord, error) {
	if limit < 1 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d is not positive", limit).WithField("limit")
	}
	limit = min(limit, MaxRecords)
	files, err := openFiles(path)
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
