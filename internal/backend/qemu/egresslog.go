package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

const (
	// seqJump is added to the numbers of records after the host was booted
	// again: the disk may not have what was last written to it, and no number
	// may be given twice.
	seqJump = 10000
	// maxEgressLine bounds a line that is taken for a record, in bytes.
	maxEgressLine = 64 << 10
	// maxEgressRecords bounds one answer of EgressLog.
	maxEgressRecords = 10000
)

// egressLog is the sandbox's audit records: JSON lines that begin with their
// number, in a bounded log.
type egressLog struct {
	log  *boundedLog
	vmid int

	mu  sync.Mutex
	seq int64 // of the last record
}

// openEgressLog opens the log in a sandbox's directory and goes on where it
// ends. rebooted says that the host was since it was written.
func openEgressLog(dir string, vmid int, rebooted bool) (*egressLog, error) {
	last, whole, err := lastSeq(dir)
	if err != nil {
		return nil, err
	}
	if rebooted && last > 0 {
		last += seqJump
	}
	log, err := openLog(filepath.Join(dir, fileEgress), egressMax, egressRate, time.Now)
	if err != nil {
		return nil, err
	}
	if !whole {
		_, _ = log.Write([]byte("\n")) // so that half a line does not spoil the next one
	}
	return &egressLog{log: log, vmid: vmid, seq: last}, nil
}

// write gives a record its number and appends it.
func (l *egressLog) write(r agentlab.EgressRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Seq, r.VMID = l.seq+1, l.vmid
	r.Name, r.Error = clean(r.Name), clean(r.Error)
	line, err := json.Marshal(r)
	if err != nil {
		return
	}
	l.seq++ // also for one that the log drops: the gap tells of it
	_, _ = l.log.Write(append(line, '\n'))
}

// Close closes the file.
func (l *egressLog) Close() error { return l.log.Close() }

// egressFiles opens the halves of a log, the older first; either may be
// missing. A change of halves in between is noticed.
func egressFiles(dir string) (files []*os.File, err error) {
	open := func(name string) (*os.File, error) {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return f, err
	}
	for {
		newer, err := open(fileEgress)
		if err != nil {
			return nil, err
		}
		older, err := open(fileEgress + oldSuffix)
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
func lastSeq(dir string) (last int64, whole bool, err error) {
	files, err := egressFiles(dir)
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
	br := bufio.NewReaderSize(r, maxEgressLine)
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

// EgressLog implements backend.EgressLogger.
func (d *Driver) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	if limit < 1 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d is not above 0", limit).WithField("limit")
	}
	if err := validRef(ref); err != nil {
		return nil, err
	}
	if _, err := d.load(ref); err != nil {
		return nil, err
	}
	limit = min(limit, maxEgressRecords)
	files, err := egressFiles(d.dir(ref))
	if err != nil {
		return nil, fault(err, "cannot read the egress log of sandbox %d", ref.VMID)
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
			if json.Unmarshal(line, &r) == nil && r.Seq == seq && r.VMID == ref.VMID {
				out = append(out, r)
				after = seq // never backwards
			}
			return len(out) < limit && ctx.Err() == nil
		})
		if err != nil {
			return nil, fault(err, "cannot read the egress log of sandbox %d", ref.VMID)
		}
		if len(out) >= limit {
			break
		}
	}
	if ctx.Err() != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "reading the egress log of sandbox %d: %w", ref.VMID, context.Cause(ctx))
	}
	return out, nil
}
