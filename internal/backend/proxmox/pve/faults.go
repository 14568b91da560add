package pve

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// fault is one row of the table of a node's error texts. Proxmox answers
// almost every fault with status 500 and a text, and the exit status of a task
// is also a text, so only the text identifies the fault. A text without a
// matching row has code internal: it proves nothing, in particular not that an
// object is absent.
type fault struct {
	text *lazyre.Regexp
	code agentlab.Code
	hint string
}

func row(text string, code agentlab.Code, hint string) fault {
	return fault{lazyre.New(text), code, hint}
}

// absent matches the two texts for "that VM has no configuration on this
// node". The node reads its own cluster file system, so it is a proof for that
// node.
var absent = []*lazyre.Regexp{
	lazyre.New(`^Configuration file 'nodes/[^/']+/qemu-server/(\d+)\.conf' does not exist$`),
	lazyre.New(`^unable to find configuration file for VM (\d+) on node '[^']+'$`),
}

const (
	hintLock  = "try again; if the error persists, find the lock with qm config and remove a stale one on the node with qm unlock"
	hintRoot  = "this requires root, which an API token never is: use proxmox.transport: shell on the node"
	hintSpace = "free or add space on the storage"
)

// faults is searched in order; the first matching row decides.
var faults = []fault{
	// Conflicts. The number may be another user's.
	row(`^unable to create VM \d+: config file already exists`, agentlab.CodeExists, "the VMID is in use by a VM or container"),
	row(`^unable to create VM \d+ - (VM|CT) \d+ already exists on node`, agentlab.CodeExists, "the VMID is in use by a VM or container"),
	// A clone checks only VMs of its own node. The cluster file system reports VMs of other
	// nodes, and containers.
	row(`^close \(rename\) atomic file '[^']*/qemu-server/\d+\.conf' failed: File exists`, agentlab.CodeExists, "the VMID is in use by a container or by a VM on another node"),
	row(`^VM \d+ already exists`, agentlab.CodeExists, "the VMID is in use by a VM or container"),
	row(`^snapshot name '[^']*' already used`, agentlab.CodeExists, ""),
	row(`(dataset|disk image '[^']*'|[Ll]ogical [Vv]olume .*|pool '[^']*'|Security group '[^']*') already exists`, agentlab.CodeExists, ""),

	// The guest and its agent: before the locks, whose texts also end in "got timeout".
	row(`^QEMU guest agent is not running`, agentlab.CodeUnavailable, "the guest agent is not started yet or not installed"),
	row(`^No QEMU guest agent configured`, agentlab.CodeUnavailable, "set agent=1 on the VM or on its template"),
	row(`(qga|qmp) command '[^']*' failed - got timeout`, agentlab.CodeUnavailable, ""),
	row(`^VM quit/powerdown failed`, agentlab.CodeTimeout, "the guest did not shut down in time; stop the VM"),

	// Locks.
	row(`^can't lock file '[^']*' - got timeout`, agentlab.CodeBusy, hintLock),
	row(`^cfs-lock '[^']*' error: got lock request timeout`, agentlab.CodeBusy, hintLock),
	row(`^VM is locked \(`, agentlab.CodeBusy, hintLock),
	row(`^Failed to obtain guest migration lock`, agentlab.CodeBusy, hintLock),
	row(`^checksum mismatch \(file change by other user\?\)`, agentlab.CodeBusy, "the configuration has been changed: read it again"),
	row(`dataset is busy|[Dd]evice or resource busy|target is busy`, agentlab.CodeBusy, "the volume is in use; try again"),
	row(`unable to (apply|delete) .*volume is still in use`, agentlab.CodeConflict, "the VM has a pending change that cannot be applied: revert the change"),

	// Not possible in the current state.
	row(`^VM \d+ (is )?not running`, agentlab.CodeConflict, "start the VM first"),
	row(`^VM \d+ already running`, agentlab.CodeConflict, ""),
	row(`^VM \d+ is running - destroy failed`, agentlab.CodeConflict, "stop the VM first"),
	row(`^VM is paused - cannot shutdown`, agentlab.CodeConflict, "resume or stop the VM first"),
	row(`still in use by linked clone|has dependent clones`, agentlab.CodeConflict, "destroy the clones first"),
	row(`^you can't .*template`, agentlab.CodeConflict, ""),
	row(`protection mode enabled`, agentlab.CodeDenied, "the VM has protection mode enabled: set protection=0 to allow its deletion"),

	// Access denied.
	row(`^only root can set '[^']*' config`, agentlab.CodeDenied, hintRoot),
	row(`^Only root (may use this option|can pass arbitrary filesystem paths)`, agentlab.CodeDenied, hintRoot),
	row(`^please run as root`, agentlab.CodeDenied, "proxmox.transport: shell requires root on the node"),
	row(`^(ipcc_send_rec.* failed|Unable to load access control list): Connection refused`, agentlab.CodeUnavailable, "the cluster file system of the node is not running: systemctl status pve-cluster"),
	row(`^ipcc_send_rec.* failed|^Unable to load access control list`, agentlab.CodeDenied, "the cluster file system (pve-cluster.service) must be running, and accepts only user root with group root"),
	row(`^Permission check failed \(pool '[^']*' does not exist\)`, agentlab.CodeInvalid, "create the pool with: pveum pool add"),
	row(`^Permission check failed`, agentlab.CodeDenied, ""), // hint: grantHint

	// No space.
	row(`(?i)no space left on device|out of space|insufficient free (space|extents)|not enough (free )?space|disk quota exceeded|insufficient suitable allocatable extents|free space in thin pool .* reached threshold`, agentlab.CodeNoSpace, hintSpace),

	row(`[Cc]annot (allocate memory|set up guest memory)`, agentlab.CodeBusy, "the node has not enough free memory for this VM; stop other VMs or try again later"),
	row(`^KVM virtualisation configured, but not available`, agentlab.CodeUnavailable, "enable virtualization in the node's firmware, or nested virtualization on its host"),

	// Not supported by this storage or this version.
	row(`^Full clone feature is not supported for a snapshot of`, agentlab.CodeUnsupported, "storages of type zfspool cannot copy a snapshot: restore the snapshot in its own sandbox, or put the template on LVM-thin, Ceph RBD or qcow2 files"),
	row(`^(Linked|Full) clone feature is not supported`, agentlab.CodeUnsupported, "the source or its storage does not support this kind of clone: convert the source to a template, or use a full clone"),
	row(`^parameter '(storage|format)' not allowed for linked clones`, agentlab.CodeUnsupported, "a linked clone uses the storage of its template"),
	row(`^can't clone (VM to node|to non-shared storage) '`, agentlab.CodeUnsupported, "create the template on each node, or move all its volumes, including the cloud-init drive, to shared storage"),
	row(`^snapshot feature is not available`, agentlab.CodeUnsupported, "a disk of the VM is on a storage without snapshots, e.g. a raw file or LVM: use a template on ZFS, LVM-thin, Ceph RBD or qcow2 files"),
	row(`^can't rollback, `, agentlab.CodeConflict, "this storage can return only to the newest snapshot: delete the newer ones first"),
	row(`^unable to rollback to incomplete snapshot`, agentlab.CodeConflict, "delete the snapshot: a task that saved or deleted it was killed"),
	row(`snapshot has dependent clones`, agentlab.CodeConflict, "a clone of the snapshot was made outside of AgentLab: zfs list -t all -o name,origin"),
	row(`^Method '[^']*' not implemented|^No '\w+' handler defined for`, agentlab.CodeUnsupported, "this version of Proxmox VE does not have this API call; version 8.0 or later is required"),
	row(`^property is not defined in schema`, agentlab.CodeUnsupported, "this version of Proxmox VE does not support this parameter"),

	// An object in the configuration does not exist.
	row(`^storage '[^']*' does not exist`, agentlab.CodeInvalid, "use a storage that pvesm status lists on the node"),
	row(`^no such cluster node '`, agentlab.CodeInvalid, "use a node that pvesh get /nodes lists"),
	row(`^bridge '[^']*' does not exist`, agentlab.CodeUnavailable, "create the bridge on the node"),
	row(`^volume '[^']*' does not exist`, agentlab.CodeUnavailable, "a file or volume in the VM's configuration does not exist"),
	row(`^timeout: no zvol device link for`, agentlab.CodeUnavailable, "the volume does not exist, or udev is slow"),

	// A required service does not answer.
	row(`^`+noWorker, agentlab.CodeUnavailable, "the node could not start a task; try again"),
	row(`^hostname lookup '[^']*' failed`, agentlab.CodeUnavailable, "the node cannot resolve the name of the other node: check the name"),
	row(`^storage '[^']*' is (not online|not active|disabled|not available)|could not activate storage`, agentlab.CodeUnavailable, "activate the storage on the node"),
	row(`cluster not ready - no quorum`, agentlab.CodeUnavailable, "the cluster has no quorum and rejects all changes: bring more nodes online"),
	row(`^unexpected status$|^unable to (read tail|open file|extract last line|get last line from task log)\b|^(received|interrupted by) (interrupt|signal)$`, agentlab.CodeUnknownOutcome, "the task was killed, or the node was restarted"),
	row(`^Failed to (start transient|connect to|create bus)`, agentlab.CodeUnavailable, "systemd-run could not run the program"),
	row(`(?i)^no such task$`, agentlab.CodeNotFound, ""),
}

// Class is a kind of fault that callers handle in a way of its own.
type Class struct {
	code agentlab.Code
	text *lazyre.Regexp
}

// The classes. Each text is a part of one of the rows above.
var (
	NoLinkedClone     = Class{agentlab.CodeUnsupported, lazyre.New(`Linked clone`)} // of the template's storage
	VMRuns            = Class{agentlab.CodeConflict, lazyre.New(`is running`)}
	VMProtected       = Class{agentlab.CodeDenied, lazyre.New(`protection mode`)}
	NotNewestSnapshot = Class{agentlab.CodeConflict, lazyre.New(`is not most recent snapshot`)}
)

// Is reports whether err is a fault of the class.
func (c Class) Is(err error) bool {
	return agentlab.CodeOf(err) == c.code && c.text.MatchString(err.Error())
}

// faultOf returns the node's answer in an error.
func faultOf(err error) (*Fault, bool) { return errors.AsType[*Fault](err) }

// callError converts the transport's error to the error of a call.
func callError(what string, err error) error {
	f, ok := errors.AsType[*Fault](err)
	if !ok {
		if e, ok := errors.AsType[*agentlab.Error](err); ok {
			c := *e
			c.Message = what + ": " + e.Message
			return &c
		}
		return agentlab.Errorf(agentlab.CodeInternal, "%s: %w", what, err)
	}
	code, hint := f.classify()
	e := agentlab.Errorf(code, "%s: %s", what, f.text())
	e.Err = hiddenCause{f}
	if hint != "" {
		e = e.WithHint("%s", hint)
	}
	if names := f.paramNames(); len(names) > 0 {
		e = e.WithField(names[0])
	}
	return e
}

// hiddenCause keeps the answer in the error chain without repeating its text.
type hiddenCause struct{ *Fault }

func (hiddenCause) Error() string   { return "" }
func (q hiddenCause) Unwrap() error { return q.Fault }

// classify returns the code and hint for an answer.
func (f *Fault) classify() (agentlab.Code, string) {
	if f.Status == 401 {
		return agentlab.CodeDenied, "the API token is invalid, disabled or expired: check token_id (user@realm!name) and the secret of the token"
	}
	for _, name := range f.paramNames() {
		if code, hint, ok := lookup(f.Params[name]); ok {
			return code, hint
		}
	}
	if len(f.Params) > 0 {
		return agentlab.CodeInvalid, ""
	}
	if code, hint, ok := lookup(f.Message); ok {
		return code, hint
	}
	if f.Status == 403 {
		return agentlab.CodeDenied, ""
	}
	return agentlab.CodeInternal, ""
}

// lookup returns the code and hint of the row for a text.
func lookup(text string) (agentlab.Code, string, bool) {
	text = strings.TrimSpace(text)
	if strings.HasPrefix(text, agentError) {
		return agentlab.CodeInternal, "", true
	}
	for _, re := range absent {
		if re.MatchString(text) {
			return agentlab.CodeNotFound, "", true
		}
	}
	text = strings.TrimPrefix(text, "clone failed: ") // an error after the new VM's configuration was created
	for _, r := range faults {
		if r.text.MatchString(text) {
			hint := r.hint
			if hint == "" && r.code == agentlab.CodeDenied {
				hint = grantHint(text)
			}
			return r.code, hint, true
		}
	}
	return "", "", false
}

var missingPrivilege = lazyre.New(`^Permission check failed \((/[^,]*), ([\w.]+(?:\|[\w.]+)*)\)`)

// grantHint returns which privilege to grant on which path, if the refusal
// contains them.
func grantHint(text string) string {
	m := missingPrivilege.FindStringSubmatch(text)
	if m == nil {
		return "Proxmox VE does not report which privilege is missing (for example for a clone without a pool); agentlab init lists missing privileges"
	}
	return "the token and its user both require a role with " + strings.ReplaceAll(m[2], "|", " or ") + " on " + m[1] + "; agentlab init prints the pveum commands"
}

// text returns the answer in one line, with the reasons of rejected
// parameters.
func (f *Fault) text() string {
	s := agentlab.OneLine(strings.Trim(f.Message, ".; \n"), 500)
	if s == "" {
		s = "status " + strconv.Itoa(f.Status)
	}
	for _, name := range f.paramNames() {
		s += "; " + agentlab.OneLine(name+": "+strings.Join(strings.Fields(f.Params[name]), " "), 300)
	}
	return s
}

func (f *Fault) paramNames() []string {
	names := make([]string, 0, len(f.Params))
	for n := range f.Params {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// onlyAboutVM changes the code not_found of an error about another VM to internal:
// it proves nothing about the VM of the call.
func onlyAboutVM(err error, vmid int) error {
	if agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return err
	}
	if f, ok := faultOf(err); ok {
		for _, re := range absent {
			if m := re.FindStringSubmatch(strings.TrimSpace(f.Message)); m != nil && m[1] == strconv.Itoa(vmid) {
				return err
			}
		}
	}
	return withCode(err, agentlab.CodeInternal, agentlab.HintOf(err))
}

// withCode returns an error of this package with another code and hint.
func withCode(err error, code agentlab.Code, hint string) error {
	e, _ := errors.AsType[*agentlab.Error](err)
	c := *e
	c.Code, c.Hint = code, hint
	return &c
}

// explainTask returns the error of a failed task. The exit status has only the
// last line of a tool's error. If that is not meaningful, the last lines of
// the log are searched too, but they prove neither absence nor existence.
func explainTask(u UPID, exit string, tail []string) error {
	code, hint, ok := lookup(exit)
	if ok && code == agentlab.CodeNotFound && !absentIs(exit, u.ID()) {
		code = agentlab.CodeInternal
	}
	if !ok {
		code = agentlab.CodeInternal
		for _, line := range slices.Backward(tail) {
			c, h, ok := lookup(line)
			if ok && c != agentlab.CodeNotFound && c != agentlab.CodeExists && c != agentlab.CodeUnknownOutcome {
				code, hint = c, h
				break
			}
		}
	}
	e := agentlab.Errorf(code, "%s of %s failed: %s%s", u.Type(), u.ID(), agentlab.OneLine(exit, 500), logExcerpt(exit, tail))
	e.Err = hiddenCause{&Fault{Message: exit}}
	if hint != "" {
		e = e.WithHint("%s", hint)
	}
	return e
}

func absentIs(text, id string) bool {
	for _, re := range absent {
		if m := re.FindStringSubmatch(text); m != nil && m[1] == id {
			return true
		}
	}
	return false
}

// logExcerpt returns the lines of a log that add information to the exit status.
func logExcerpt(exit string, tail []string) string {
	var lines []string
	for _, l := range tail {
		l = strings.TrimSpace(l)
		if l == "" || strings.HasPrefix(l, "TASK ") || l == exit || l == "trying to acquire lock..." {
			continue
		}
		lines = append(lines, agentlab.OneLine(l, 200))
	}
	if len(lines) == 0 {
		return ""
	}
	return " (log: " + strings.Join(lines[max(0, len(lines)-5):], "; ") + ")"
}
