package server

import (
	"context"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// defaultGrace is how long a guest may take to shut down.
const defaultGrace = 30 * time.Second

type createSandboxInput struct{ Body api.SandboxCreate }

func (s *Server) createSandbox(ctx context.Context, in *createSandboxInput) (api.Sandbox, error) {
	r, err := sandboxRequest(in.Body)
	if err != nil {
		return api.Sandbox{}, err
	}
	if err := s.mayCreateSandbox(ctx, r); err != nil {
		return api.Sandbox{}, err
	}
	create := s.cfg.Services.Sandboxes.Create
	if r.Job != nil {
		create = s.cfg.Services.Jobs.CreateWithSandbox
	}
	sb, err := create(ctx, r)
	return toSandbox(sb), err
}

type listSandboxesInput struct {
	State     string `query:"state" enum:"REQUESTED,PROVISIONING,BOOTING,POOLED,READY,RUNNING,COMPLETED,FAILED,TIMEOUT,SUSPENDED,STOPPED,DESTROYED" doc:"Only sandboxes in this state"`
	Destroyed bool   `query:"destroyed" doc:"Include DESTROYED sandboxes and those of the warm pool"`
	PageInput
}

func (s *Server) listSandboxes(ctx context.Context, in *listSandboxesInput) (api.List[api.Sandbox], error) {
	after, err := in.afterID("sandboxes")
	if err != nil {
		return api.List[api.Sandbox]{}, err
	}
	list, err := s.cfg.Services.Sandboxes.List(ctx, agentlab.SandboxFilter{
		States: optionalFilter(agentlab.SandboxState(in.State)), Destroyed: in.Destroyed, Limit: in.Limit + 1, AfterVMID: int(after),
		NoPooled: !in.Destroyed && in.State != string(agentlab.SandboxPooled),
	})
	if err != nil {
		return api.List[api.Sandbox]{}, err
	}
	return pageOf("sandboxes", list, in.Limit, toSandbox, func(sb agentlab.Sandbox) []string { return []string{strconv.Itoa(sb.VMID)} }), nil
}

// getSandbox measures the memory only for clients that want it: the host reads the
// page tables of the whole VM, which takes longer than the rest of the call.
func (s *Server) getSandbox(ctx context.Context, in *sandboxShowInput) (api.Sandbox, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	out := toSandbox(sb)
	if err == nil && in.Memory {
		if m, ok := s.cfg.Services.Sandboxes.Memory(ctx, sb); ok {
			out.Memory = &api.Memory{UniqueBytes: m.Unique, SharedBytes: m.Shared, ProportionalBytes: m.Proportional}
		}
	}
	return out, err
}

// updateSandbox finds a sandbox by its name, that of its session, or its VMID, and calls
// do with it.
func (s *Server) updateSandbox(ctx context.Context, arg string, do func(vmid int) (agentlab.Sandbox, error)) (api.Sandbox, error) {
	sb, err := s.cfg.Services.Sandboxes.GetUnique(ctx, arg)
	if err != nil {
		return api.Sandbox{}, err
	}
	sb, err = do(sb.VMID)
	return toSandbox(sb), err
}

func (s *Server) startSandbox(ctx context.Context, in *sandboxInput) (api.Sandbox, error) {
	return s.updateSandbox(ctx, in.Sandbox, func(vmid int) (agentlab.Sandbox, error) {
		return s.cfg.Services.Sandboxes.Start(ctx, vmid)
	})
}

type suspendSandboxInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Body    *api.SandboxSuspend
}

func (s *Server) suspendSandbox(ctx context.Context, in *suspendSandboxInput) (api.Sandbox, error) {
	return s.updateSandbox(ctx, in.Sandbox, func(vmid int) (agentlab.Sandbox, error) {
		return s.cfg.Services.Sandboxes.Suspend(ctx, vmid, in.Body != nil && in.Body.ToDisk)
	})
}

func (s *Server) resumeSandbox(ctx context.Context, in *sandboxInput) (api.Sandbox, error) {
	return s.updateSandbox(ctx, in.Sandbox, func(vmid int) (agentlab.Sandbox, error) {
		return s.cfg.Services.Sandboxes.Resume(ctx, vmid)
	})
}

type stopSandboxInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Body    *api.SandboxStop
}

func (s *Server) stopSandbox(ctx context.Context, in *stopSandboxInput) (api.Sandbox, error) {
	grace := defaultGrace
	if in.Body != nil && in.Body.GraceSeconds != nil {
		grace = time.Duration(*in.Body.GraceSeconds) * time.Second
	}
	return s.updateSandbox(ctx, in.Sandbox, func(vmid int) (agentlab.Sandbox, error) {
		return s.cfg.Services.Sandboxes.Stop(ctx, vmid, grace)
	})
}

type destroySandboxInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Purge   bool   `query:"purge" doc:"Destroy it also if its job has work that is not stored, for which it would be kept for retention.salvage_hours"`
}

func (s *Server) destroySandbox(ctx context.Context, in *destroySandboxInput) (api.Sandbox, error) {
	return s.updateSandbox(ctx, in.Sandbox, func(vmid int) (agentlab.Sandbox, error) {
		if in.Purge {
			return s.cfg.Services.Sandboxes.Purge(ctx, vmid)
		}
		return s.cfg.Services.Sandboxes.Destroy(ctx, vmid)
	})
}

type renewLeaseInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Body    api.LeaseRenew
}

func (s *Server) renewLease(ctx context.Context, in *renewLeaseInput) (api.Sandbox, error) {
	return s.updateSandbox(ctx, in.Sandbox, func(vmid int) (agentlab.Sandbox, error) {
		return s.cfg.Services.Sandboxes.RenewLease(ctx, vmid, minutes(in.Body.TTLMinutes))
	})
}

type consoleInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Follow  bool   `query:"follow" doc:"Stream until the sandbox is destroyed"`
}

func (s *Server) console(ctx context.Context, in *consoleInput) (*huma.StreamResponse, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	if err != nil {
		return nil, err
	}
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		r, err := s.cfg.Services.Sandboxes.ConsoleLog(ctx, sb.VMID, in.Follow)
		return r, textHeader, err
	})
}

// connect connects the client of a request with the header Upgrade to what open opens
// in a sandbox.
func (s *Server) connect(ctx context.Context, upgrade, protocol, sandbox string, open func(vmid int) (net.Conn, error)) (*huma.StreamResponse, error) {
	if err := requireUpgrade(upgrade, protocol); err != nil {
		return nil, err
	}
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, sandbox)
	if err != nil {
		return nil, err
	}
	conn, err := open(sb.VMID)
	if err != nil {
		return nil, err
	}
	return s.upgrade(conn, protocol), nil
}

type execInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Upgrade string `header:"Upgrade" doc:"agentlab-stream, with Connection: Upgrade"`
	Body    guestapi.ExecRequest
}

func (s *Server) exec(ctx context.Context, in *execInput) (*huma.StreamResponse, error) {
	return s.connect(ctx, in.Upgrade, guestapi.StreamProtocol, in.Sandbox, func(vmid int) (net.Conn, error) {
		return s.cfg.Services.Sandboxes.Exec(ctx, vmid, in.Body)
	})
}

type attachInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Upgrade string `header:"Upgrade" doc:"agentlab-stream, with Connection: Upgrade"`
	Body    guestapi.AttachRequest
}

func (s *Server) attach(ctx context.Context, in *attachInput) (*huma.StreamResponse, error) {
	return s.connect(ctx, in.Upgrade, guestapi.StreamProtocol, in.Sandbox, func(vmid int) (net.Conn, error) {
		return s.cfg.Services.Sandboxes.Attach(ctx, vmid, in.Body)
	})
}

type dialInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Upgrade string `header:"Upgrade" doc:"agentlab-tcp, with Connection: Upgrade"`
	Port    uint16 `query:"port" required:"true" minimum:"1" maximum:"65535" doc:"TCP port in the guest"`
}

func (s *Server) dial(ctx context.Context, in *dialInput) (*huma.StreamResponse, error) {
	return s.connect(ctx, in.Upgrade, api.TCPProtocol, in.Sandbox, func(vmid int) (net.Conn, error) {
		return s.cfg.Services.Sandboxes.DialGuest(ctx, vmid, in.Port)
	})
}

type sshKeyInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Body    api.SSHKey
}

func (s *Server) sshKey(ctx context.Context, in *sshKeyInput) (api.SSHTarget, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	if err != nil {
		return api.SSHTarget{}, err
	}
	t, err := s.cfg.Services.Sandboxes.SSHKey(ctx, sb.VMID, guestapi.SSHKeyRequest{
		User: in.Body.User, PublicKey: in.Body.PublicKey, Seconds: in.Body.Seconds,
	})
	if err != nil {
		return api.SSHTarget{}, err
	}
	return api.SSHTarget{User: t.User, Port: int(t.Port), HostKeys: append([]string{}, t.HostKeys...)}, nil
}
